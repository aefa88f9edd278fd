"""Ranges of the numbers of a recipe."""

from collections.abc import Mapping


def require_at_least(settings: object, least: Mapping[str, float]) -> None:
    """Check that numbers of a table are in range.

    Args:
        settings: the table.
        least: what each may be at least, by the name of its field.

    Raises:
        ValueError: naming the first that is out of range.
    """
    for name, lowest in least.items():
        if not getattr(settings, name) >= lowest:  # nor is what is no number
            raise ValueError(f"{name} is {getattr(settings, name)}; it must be {lowest:g} or more")
