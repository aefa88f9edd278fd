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


def check_seed(seed: int) -> None:
    """Check that all that is random can be seeded by a number.

    Raises:
        ValueError: if torch takes no such seed.
    """
    if not 0 <= seed < 1 << 63:
        raise ValueError(f"seed is {seed}; it must be 0 or more, and below 2^63")
