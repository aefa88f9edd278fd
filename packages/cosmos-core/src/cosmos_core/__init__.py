"""Placeholder surface of cosmos_core."""

__all__: list[str] = []
