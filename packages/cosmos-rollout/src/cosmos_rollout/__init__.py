"""Placeholder surface of cosmos_rollout."""

__all__: list[str] = []
