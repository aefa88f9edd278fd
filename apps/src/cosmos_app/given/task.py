"""What the trainer of a run on given data needs of that which it learns."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeVar

from torch import nn

from cosmos_app.given.divided import Divided
from cosmos_parallel import Learner, LossResult, Scorer, StepReport

Batch = TypeVar("Batch")


class Task(Protocol[Batch]):
    """Examples, their batches and their loss, on one rank.

    All ranks call the methods in the same order.
    """

    @property
    def data(self) -> Divided[Any]:
        """What is trained on and validated on."""
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

    def held_out(self, *, rank: int, size: int) -> Mapping[str, Sequence[Batch]]:
        """Return a share of the examples kept back, by data set; empty if there are none."""
        ...

    def loss(self, model: nn.Module, batch: Batch) -> LossResult:
        """Run the model over a batch that has its scores."""
        ...

    def figures(self, report: StepReport) -> Mapping[str, float]:
        """Return metrics of a step beside loss, norm and rate."""
        ...
