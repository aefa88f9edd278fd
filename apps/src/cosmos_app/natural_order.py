"""Names in the order in which people count: rollout-2 before rollout-10."""

import re


def by_number(name: str) -> list[tuple[str, int]]:
    """Return what to sort a name by: its texts, and between them its numbers as numbers."""
    parts = [*re.split(r"(\d+)", name), "0"]
    return [(text, int(number)) for text, number in zip(parts[::2], parts[1::2], strict=True)]
