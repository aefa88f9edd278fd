"""Rows of a run on given data, divided into what is trained on and what is validated on."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Generic, TypeVar

from cosmos_app.errors import DataError
from cosmos_app.given.data_config import GivenSource
from cosmos_app.given.preference_data import PreferenceFormat
from cosmos_parallel import (
    ExampleMixture,
    SftBatchConfig,
    SftDataError,
    SftFormat,
    read_rows,
    step_examples,
)

OfRow = TypeVar("OfRow")
Rows = SftFormat | PreferenceFormat


@dataclass(frozen=True, kw_only=True, slots=True)
class Divided(Generic[OfRow]):
    """Examples in memory.

    Attributes:
        train: to train on, one data set after another.
        held_out: to validate on, by data set; the only one of a run has an empty name. None is
            without examples.
        sizes: how many of ``train`` each set has that has a name.
        mixture: how the sets take turns; ``None`` where all examples are drawn alike.
    """

    train: Sequence[OfRow]
    held_out: Mapping[str, Sequence[OfRow]] = field(default_factory=dict[str, Sequence[OfRow]])
    sizes: Mapping[str, int] = field(default_factory=dict[str, int])
    mixture: ExampleMixture | None = None

    @classmethod
    def of(cls, train: Sequence[OfRow], held_out: Sequence[OfRow] = ()) -> "Divided[OfRow]":
        """Return the examples of a run with one data set."""
        return cls(train=train, held_out={"": held_out} if held_out else {})

    @classmethod
    def of_sets(
        cls,
        sets: Mapping[str, tuple[Sequence[OfRow], Sequence[OfRow]]],
        shares: Mapping[str, float],
    ) -> "Divided[OfRow]":
        """Join data sets.

        Args:
            sets: what of each is trained on, and what is kept back.
            shares: of those that are trained on; none if all examples are drawn alike.

        Raises:
            SftDataError: if a set with a share has nothing to train on.
        """
        sizes = {name: len(train) for name, (train, _) in sets.items() if name and train}
        return cls(
            train=tuple(chain.from_iterable(train for train, _ in sets.values())),
            held_out={name: kept for name, (_, kept) in sets.items() if kept},
            sizes=sizes,
            mixture=ExampleMixture(sizes, shares) if shares else None,
        )

    def rows(self) -> Iterator[OfRow]:
        """Return all of them."""
        return chain(self.train, *self.held_out.values())

    def of_step(self, batch: SftBatchConfig, step: int) -> list[OfRow]:
        """Return the examples of a step, counted from 0."""
        return [
            self.train[place]
            for place in step_examples(self.mixture or len(self.train), batch, step)
        ]

    def position(self, num_drawn: int) -> dict[str, dict[str, int]]:
        """Return where each set that has a name is after so many examples.

        ``num_examples`` is its size; where sets take turns, ``turns`` how many of each thousand
        examples are of it, and ``drawn`` how many have been.
        """
        places = {name: {"num_examples": size} for name, size in self.sizes.items()}
        if self.mixture is not None:
            drawn = self.mixture.drawn(num_drawn)
            for name, turns in self.mixture.turns.items():
                places[name] |= {"turns": turns, "drawn": drawn[name]}
        return places


def split_off(
    source: GivenSource,
    load: Callable[[Path, Rows], Sequence[OfRow]],
) -> tuple[Sequence[OfRow], Sequence[OfRow]]:
    """Return the rows to train on, and those to validate on; either may be none.

    Args:
        source: the data set.
        load: returns what becomes of each row of a file, those aside of which nothing does.

    Raises:
        SftDataError: if they cannot be read, naming the set if it has a name.
        DataError: if nothing is left to train on, likewise.
    """
    try:
        parts = [load(path, replace(source.rows, split=split)) for path, split in source.parts]
    except SftDataError as error:
        raise SftDataError(f"{source.label}{error}") from error
    if source.path is None:
        return (), parts[0]
    train, *apart = parts
    kept = len(train) - source.held_out
    if kept < 1:
        num_rows = sum(1 for _ in read_rows(source.path, source.rows.split))
        require_rest(source, num_rows, num_too_long=num_rows - len(train))
    return (train[:kept], train[kept:]) if source.held_out else (train, apart[0] if apart else ())


def require_rest(source: GivenSource, num_rows: int, *, num_too_long: int = 0) -> None:
    """Look whether rows to train on are left.

    Args:
        source: the data set, which is trained on.
        num_rows: of the split that is trained on.
        num_too_long: how many of them are longer than a row may be, where that is known.

    Raises:
        DataError: if all are kept back or too long, naming the set if it has a name.
    """
    if num_rows - num_too_long > source.held_out:
        return
    longer = f", {num_too_long} of them longer than data.rows.max_tokens={source.rows.max_tokens}"
    raise DataError(
        f"{source.label}data.held_out is {source.held_out}, but {source.path} has {num_rows} rows"
        f"{longer if num_too_long else ''}: none would be left to train on"
    )
