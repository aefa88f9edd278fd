"""Placeholder surface of cosmos_wfm."""

__all__: list[str] = []
