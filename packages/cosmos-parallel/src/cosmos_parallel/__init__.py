"""Placeholder surface of cosmos_parallel."""

__all__: list[str] = []
