"""What the trainer of a run on given data needs of that which it learns."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol, TypeVar

from torch import nn

from cosmos_app.errors import DataError
from cosmos_app.given.preference_data import PreferenceFormat
from cosmos_app.given.recipe import PreferenceDataConfig, SftDataConfig
from cosmos_parallel import Learner, LossResult, Scorer, SftFormat, StepReport, read_rows

Batch = TypeVar("Batch")
OfRow = TypeVar("OfRow")
Rows = SftFormat | PreferenceFormat


class Task(Protocol[Batch]):
    """Examples, their batches and their loss, on one rank.

    All ranks call the methods in the same order.
    """

    @property
    def num_examples(self) -> int:
        """Examples to train on."""
        ...

    @property
    def filler(self) -> Batch:
        """A batch of weight 0."""
        ...

    @property
    def scorers(self) -> Sequence[Scorer[Batch]]:
        """The frozen models whose scores ``loss`` reads of its batches."""
        ...

    def prepare(self, learner: Learner, step: int) -> None:
        """Work out what a step needs of all its examples, before any rank takes it."""
        ...

    def batches(self, step: int, *, rank: int, size: int) -> Sequence[Batch]:
        """Return share ``rank`` of ``size`` of a step."""
        ...

    def prepare_held_out(self, learner: Learner) -> None:
        """Work out what validating needs of the examples kept back, by the weights as they are."""
        ...

    def held_out(self, *, rank: int, size: int) -> Sequence[Batch] | None:
        """Return a share of the examples kept back; ``None`` if there are none."""
        ...

    def loss(self, model: nn.Module, batch: Batch) -> LossResult:
        """Run the model over a batch that has its scores."""
        ...

    def figures(self, report: StepReport) -> Mapping[str, float]:
        """Return metrics of a step beside loss, norm and rate."""
        ...


def split_off(
    config: SftDataConfig | PreferenceDataConfig,
    load: Callable[[Path, Rows], Sequence[OfRow]],
) -> tuple[Sequence[OfRow], Sequence[OfRow]]:
    """Return the rows to train on, and those to validate on, which may be none.

    Args:
        config: of the data.
        load: returns what becomes of each row of a file, those aside of which nothing does.

    Raises:
        SftDataError: if they cannot be read.
        DataError: if nothing is left to train on.
    """
    train = load(config.path, config.rows)
    held_out: Sequence[OfRow] = ()
    if config.validation_path is not None:
        held_out = load(config.validation_path, config.rows)
    elif config.validation_split:
        held_out = load(config.path, replace(config.rows, split=config.validation_split))
    kept = len(train) - config.held_out
    if kept < 1:
        num_rows = sum(1 for _ in read_rows(config.path, config.rows.split))
        require_rest(config, num_rows, num_too_long=num_rows - len(train))
    return (train[:kept], train[kept:]) if config.held_out else (train, held_out)


def require_rest(
    config: SftDataConfig | PreferenceDataConfig, num_rows: int, *, num_too_long: int = 0
) -> None:
    """Look whether rows to train on are left.

    Args:
        config: of the data.
        num_rows: of the split that is trained on.
        num_too_long: how many of them are longer than a row may be, where that is known.

    Raises:
        DataError: if all are kept back or too long.
    """
    if num_rows - num_too_long > config.held_out:
        return
    longer = f", {num_too_long} of them longer than data.rows.max_tokens={config.rows.max_tokens}"
    raise DataError(
        f"data.held_out is {config.held_out}, but {config.path} has {num_rows} rows"
        f"{longer if num_too_long else ''}: none would be left to train on"
    )
