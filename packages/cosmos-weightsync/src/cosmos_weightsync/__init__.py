"""Placeholder surface of cosmos_weightsync."""

__all__: list[str] = []
