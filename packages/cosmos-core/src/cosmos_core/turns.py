"""Turns that data sets take by their shares: which set, and the how manieth row of it, is drawn.

Shares are kept by turns and not by chance, so that every stretch of draws has them, and what is
drawn follows from the ordinal alone: nothing has to be kept to go on after a restart.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

from cosmos_core.errors import CosmosError

CYCLE = 1000
"""Draws after which the turns of data sets repeat: shares are rounded to thousandths."""


class ShareError(CosmosError):
    """Raised for shares that data sets cannot have; names the set."""


class Turn(NamedTuple):
    """Whose turn it is, and how many turns that set had before."""

    name: str
    number: int


class Turns:
    """Data sets that take turns, evenly spread, by their shares.

    Args:
        shares: of each set, in any unit; together they are the whole.

    Raises:
        ShareError: if a share is not positive, or so small that its set would never have a turn.
    """

    def __init__(self, shares: Mapping[str, float]) -> None:
        self.each = turns_of(shares)
        """How many turns of a cycle each set has."""
        self._cycle = evenly_spread(self.each)

    def at(self, ordinal: int) -> Turn:
        """Return whose turn the ``ordinal``-th draw is."""
        cycle, position = divmod(ordinal, CYCLE)
        name, number = self._cycle[position]
        return Turn(name, cycle * self.each[name] + number)

    def before(self, ordinal: int) -> dict[str, int]:
        """Return how many turns each set has had before the ``ordinal``-th draw."""
        cycles, position = divmod(ordinal, CYCLE)
        had = {name: cycles * count for name, count in self.each.items()}
        for name, _ in self._cycle[:position]:
            had[name] += 1
        return had


def evenly_spread(counts: Mapping[str, int]) -> list[tuple[str, int]]:
    """Return all that there are of each name, by name and number, spread evenly over the whole."""
    numbered = [(name, number) for name, count in counts.items() for number in range(count)]
    return sorted(numbered, key=lambda one: ((one[1] + 0.5) / counts[one[0]], *one))


def turns_of(shares: Mapping[str, float]) -> dict[str, int]:
    """Divide a cycle's turns by shares, the largest remainders rounded up.

    Raises:
        ShareError: if there are none, one is not a positive number, or a set would have no turn.
    """
    if not shares:
        raise ShareError("there are no shares; want one for each data set")
    for name, share in shares.items():
        if not 0.0 < share < math.inf:
            raise ShareError(f"share of data set {name!r} is {share}; want a positive number")
    whole = sum(shares.values())
    exact = {name: CYCLE * share / whole for name, share in shares.items()}
    turns = {name: int(share) for name, share in exact.items()}
    by_remainder = sorted(exact, key=lambda name: (turns[name] - exact[name], name))
    for name in by_remainder[: CYCLE - sum(turns.values())]:
        turns[name] += 1
    idle = [name for name, count in turns.items() if count == 0]
    if idle:
        raise ShareError(
            f"data set {idle[0]!r} has a share of {shares[idle[0]]:g} of {whole:g}; less than one "
            f"in {CYCLE} that are drawn would be of it"
        )
    return turns
