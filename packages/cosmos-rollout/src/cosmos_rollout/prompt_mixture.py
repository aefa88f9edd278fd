"""Prompts of several data sets, of which each has its share of every stretch of them."""

from collections.abc import Mapping

from cosmos_rollout.errors import PromptDataError
from cosmos_rollout.prompts import PromptRow, PromptSource

CYCLE = 1000
"""Prompts after which the turns of data sets repeat: shares are rounded to thousandths."""


class PromptMixture:
    """Data sets that take turns, evenly spread, by their shares; each goes through its own epochs.

    Whose turn it is follows from the ordinal alone, as a prompt set's row does.

    Args:
        sets: by name.
        shares: of each set, in any unit; together they are the whole.

    Raises:
        PromptDataError: if shares are not those of the sets, or one is so small that its set would
            never have a turn.
    """

    def __init__(self, sets: Mapping[str, PromptSource], shares: Mapping[str, float]) -> None:
        if not sets or sets.keys() != shares.keys():
            raise PromptDataError(
                f"a mixture wants one share for each set; there are sets {sorted(sets)} and shares "
                f"of {sorted(shares)}"
            )
        self._sets = dict(sets)
        self._turns_each = turns_of(shares)
        self._turns = evenly_spread(self._turns_each)

    def data_set(self, ordinal: int) -> str:
        """Return whose turn the ``ordinal``-th prompt is."""
        return self._turns[ordinal % CYCLE][0]

    def row(self, ordinal: int) -> PromptRow:
        """Return the row of the ``ordinal``-th prompt."""
        cycle, position = divmod(ordinal, CYCLE)
        name, turn = self._turns[position]
        return self._sets[name].row(cycle * self._turns_each[name] + turn)


def evenly_spread(counts: Mapping[str, int]) -> list[tuple[str, int]]:
    """Return all that there are of each name, by name and number, spread evenly over the whole."""
    numbered = [(name, number) for name, count in counts.items() for number in range(count)]
    return sorted(numbered, key=lambda one: ((one[1] + 0.5) / counts[one[0]], *one))


def turns_of(shares: Mapping[str, float]) -> dict[str, int]:
    """Divide a cycle's turns by shares, the largest remainders rounded up.

    Raises:
        PromptDataError: if a set would have none.
    """
    whole = sum(shares.values())
    exact = {name: CYCLE * share / whole for name, share in shares.items()}
    turns = {name: int(share) for name, share in exact.items()}
    by_remainder = sorted(exact, key=lambda name: (turns[name] - exact[name], name))
    for name in by_remainder[: CYCLE - sum(turns.values())]:
        turns[name] += 1
    idle = [name for name, count in turns.items() if count == 0]
    if idle:
        raise PromptDataError(
            f"data set {idle[0]!r} has a share of {shares[idle[0]]:g} of {whole:g}; less than one "
            f"prompt in {CYCLE} would be of it"
        )
    return turns
