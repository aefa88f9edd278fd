"""Prompts of several data sets, of which each has its share of every stretch of them."""

from collections.abc import Mapping

from cosmos_core.turns import ShareError, Turns
from cosmos_rollout.errors import PromptDataError
from cosmos_rollout.prompts import PromptRow, PromptSource


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
        try:
            self._turns = Turns(shares)
        except ShareError as error:
            raise PromptDataError(str(error)) from error

    def data_set(self, ordinal: int) -> str:
        """Return whose turn the ``ordinal``-th prompt is."""
        return self._turns.at(ordinal).name

    def row(self, ordinal: int) -> PromptRow:
        """Return the row of the ``ordinal``-th prompt."""
        turn = self._turns.at(ordinal)
        return self._sets[turn.name].row(turn.number)
