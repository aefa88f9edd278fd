"""The seam between the learner and how a model runs forward and backward over micro-batches.

A plain or sharded module takes one pass after the other. A model cut into pipeline stages cannot:
its stages work on several micro-batches at once, so it takes all passes of a step together
(``TakesAllPasses``). The learner calls ``run_passes`` and need not know which it has.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor, nn

Batch = TypeVar("Batch")


class LossResult(Protocol):
    """What the learner needs of a loss: sums over the batch, nothing divided.

    The gradient must reach every trained parameter, also when no token of the batch is trainable
    (a masked sum does; a constant does not). ``metrics`` has the same keys on every call.
    """

    @property
    def total(self) -> Tensor:
        """Scalar with gradient: the sum of the loss."""
        ...

    @property
    def weight(self) -> Tensor:
        """Scalar: what ``total`` is a sum of, such as the number of trained tokens."""
        ...

    @property
    def metrics(self) -> Mapping[str, Tensor]:
        """Scalar sums, added up over micro-batches, ranks and replicas."""
        ...


LossFunction = Callable[[nn.Module, Batch], LossResult]


@dataclass(frozen=True, slots=True)
class Pass(Generic[Batch]):
    """One forward, and in training one backward.

    Attributes:
        batch: what it runs over.
        counts: false where the batch only fills in, so that all ranks pass equally often; its
            loss has no gradient then.
    """

    batch: Batch
    counts: bool = True


@runtime_checkable
class TakesAllPasses(Protocol):
    """A module that must see all passes of a step at once."""

    def run_passes(
        self,
        passes: Sequence[Pass[Any]],
        loss: LossFunction[Any],
        on_result: Callable[[Pass[Any], LossResult], None],
    ) -> None:
        """Run as `run_passes` does; ``on_result`` is called in order, on every rank alike."""
        ...


def run_passes(
    model: nn.Module,
    passes: Sequence[Pass[Batch]],
    loss: LossFunction[Batch],
    on_result: Callable[[Pass[Batch], LossResult], None],
    *,
    gradient_scale: float = 1.0,
) -> None:
    """Run the loss over every pass, and its gradient unless gradients are off; every rank calls.

    Gradients of un-normalised totals are added to ``parameter.grad``.

    Args:
        model: what ``loss`` is called with.
        passes: in order; the same number on every rank of the replica.
        loss: called once per pass.
        on_result: given every result, before its backward pass; ranks that hold parts of one copy
            of the model see the same results.
        gradient_scale: see ``TrainingMesh.gradient_scale``.
    """
    if isinstance(model, TakesAllPasses):
        model.run_passes(passes, loss, on_result)
        return
    for each in passes:
        result = loss(model, each.batch)
        on_result(each, result)
        if torch.is_grad_enabled():
            (result.total * (gradient_scale if each.counts else 0.0)).backward()
