"""Placeholder surface of cosmos_algos."""

__all__: list[str] = []
