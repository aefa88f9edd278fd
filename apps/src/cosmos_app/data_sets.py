"""Several data sets of one run: how each is called, where it lies, and what share it has."""

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cosmos_core.turns import ShareError, turns_of

_NAME = re.compile(r"[\w.+-]+")


@dataclass(frozen=True, kw_only=True, slots=True)
class DataSetConfig:
    """One of several data sets.

    Attributes:
        name: in metrics (``data_set/NAME``), and where rewards are given, in ``reward.sets`` and as
            ``data_set`` in its rows.
        path: rows that are trained on, as ``data.path``; none of a set that is only measured.
        share: of what is trained on (prompts, or examples), in any unit, beside the others' shares;
            without any, all rows of all sets are drawn alike.
        held_out_path: its rows for validation; the last of ``path`` are kept back when there is
            none, as many as ``data.held_out`` says.
    """

    name: str
    path: Path | None = None
    share: float | None = None
    held_out_path: Path | None = None

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ValueError(
                f"name is {self.name!r}; want letters, digits, and any of _ . + -, since metrics "
                "are called by it"
            )
        if self.path is None and self.held_out_path is None:
            raise ValueError(f"data set {self.name!r} has neither path nor held_out_path")
        if self.share is None:
            return
        if self.path is None:
            raise ValueError(f"data set {self.name!r} has a share of training and no path")
        if not 0.0 < self.share < math.inf:
            raise ValueError(
                f"share of data set {self.name!r} is {self.share}; want a positive number, or no "
                "path, for a set that is only measured"
            )


def check_sets(sets: Sequence[DataSetConfig]) -> None:
    """Check that data sets go together.

    Raises:
        ValueError: naming the set that does not, or saying that none is trained on.
    """
    trained = [each for each in sets if each.path is not None]
    if not trained:
        raise ValueError("no set has a path: there is nothing to train on")
    twice = [name for name, n in Counter(each.name for each in sets).items() if n > 1]
    if twice:
        raise ValueError(f"two sets are called {twice[0]!r}")
    vague = [each.name for each in trained if each.share is None]
    if vague and len(vague) < len(trained):
        raise ValueError(
            f"data set {vague[0]!r} has no share and others have; give all of them one, or none"
        )
    if shares := shares_of(sets):
        try:
            _ = turns_of(shares)
        except ShareError as error:
            raise ValueError(str(error)) from error


def shares_of(sets: Sequence[DataSetConfig]) -> dict[str, float]:
    """Return the share of each set that is trained on; none if rows are drawn alike."""
    return {each.name: each.share for each in sets if each.share is not None}
