"""How far long work is, told to whoever asked; what the work results in does not depend on it."""

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

__all__ = ["Watch", "part_of", "unwatched", "watched"]

T = TypeVar("T")
Watch = Callable[[str, float], None]
"""Told what is being done and which share of it is. What it raises ends the work."""


def unwatched(what: str, share: float) -> None:
    """Nobody asked."""


def watched(items: Sequence[T], what: str, watch: Watch) -> Iterator[T]:
    """The items, and a word now and then on how many of them are done."""
    step = max(1, len(items) // 100)
    for number, item in enumerate(items):
        if not number % step:
            watch(what, number / len(items))
        yield item


def part_of(watch: Watch, index: int, count: int) -> Watch:
    """For the ``index``-th of ``count`` parts of some work: shares of it are of the whole."""
    return lambda what, share: watch(what, (index + share) / count)
