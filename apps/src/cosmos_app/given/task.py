"""What the trainer of a run on given data needs of that which it learns."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol, TypeVar

from torch import nn

from cosmos_app.errors import DataError
from cosmos_app.given.preference_data import PreferenceFormat
from cosmos_app.given.recipe import PreferenceDataConfig, SftDataConfig
from cosmos_parallel import Learner, LossResult, Scorer, SftFormat, StepReport

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
        """Work out what validating needs of all the examples kept back, with the weights as they are."""
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
        raise DataError(
            f"data.held_out is {config.held_out}, but {config.path} has {len(train)} rows "
            f"of at most {config.rows.max_tokens} tokens: none would be left to train on"
        )
    return (train[:kept], train[kept:]) if config.held_out else (train, held_out)
