"""The seam between the learner and how a model runs forward and backward over micro-batches.

A plain or sharded module takes one pass after the other. A model cut into pipeline stages cannot:
its stages work on several micro-batches at once, so it takes all passes of a step together
(``TakesAllPasses``). The learner calls ``run_passes`` and need not know which it has. Frozen models
that a loss needs (``Scorer``) run inside each pass of a plain model, and ahead of a pipeline's.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor, nn

from cosmos_parallel.errors import MeshError

Batch = TypeVar("Batch")
Scores = Mapping[str, Tensor]


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


def passes_over(
    batches: Sequence[Batch], spare: Batch | None, num_passes: int
) -> list[Pass[Batch]]:
    """Return a pass for each batch, and as many over the spare one as are missing.

    Args:
        batches: of this rank.
        spare: fills in; ``None`` where none are missing.
        num_passes: that each rank makes.
    """
    passes = [Pass(batch) for batch in batches]
    if spare is not None:
        passes += [Pass(spare, counts=False)] * (num_passes - len(passes))
    return passes


@dataclass(frozen=True, kw_only=True, slots=True)
class Scorer(Generic[Batch]):
    """A frozen model, such as a reference or a teacher, and what a loss is told of it.

    Attributes:
        model: laid out over the same mesh as the model that is trained.
        score: called as ``score(model, batch)`` without gradients, once per pass; it calls the
            model once, and returns tensors that are small enough to be kept for all passes.
        join: returns the batch with what ``score`` returned. Under a pipeline that is zeros of the
            same shapes on ranks without the last stage, whose losses are never used.
        most_kept: of how many passes a pipeline may keep scores at a time, where they are large;
            it keeps those of as many as it has stages all the same. ``None`` for all passes.
    """

    model: nn.Module
    score: Callable[[nn.Module, Batch], Scores]
    join: Callable[[Batch, Scores], Batch]
    most_kept: int | None = None

    def __post_init__(self) -> None:
        """Check the number.

        Raises:
            ValueError: if nothing may be kept.
        """
        if self.most_kept is not None and self.most_kept < 1:
            raise ValueError(f"most_kept is {self.most_kept}; it must be 1 or more")


def tell_passes(told: Callable[[], None], *models: nn.Module | None) -> None:
    """Let models tell of their forward passes, for as long as they live.

    Args:
        told: called after each pass, in the thread that made it.
        models: the stages of one that is cut into some tell, as they run by themselves.
    """

    def tell(*_: object) -> None:
        told()

    for model in models:
        if model is not None:
            for part in getattr(model, "stages", (model,)):
                part.register_forward_hook(tell)


@runtime_checkable
class TakesAllPasses(Protocol):
    """A module that must see all passes of a step at once."""

    @property
    def least_passes(self) -> int:
        """How many passes fill it; fewer take as long."""
        ...

    def run_passes(
        self,
        passes: Sequence[Pass[Any]],
        loss: LossFunction[Any],
        on_result: Callable[[Pass[Any], LossResult], None],
    ) -> None:
        """Run as `run_passes` does; ``on_result`` is called in order, on every rank alike."""
        ...

    def score_passes(
        self, passes: Sequence[Pass[Any]], score: Callable[[nn.Module, Any], Scores]
    ) -> list[Scores]:
        """Return what ``score`` makes of each pass, without gradients; see ``Scorer.join``."""
        ...


@torch.no_grad()
def scored(batch: Batch, scorers: Sequence[Scorer[Batch]]) -> Batch:
    """Return a batch with the scores of models that can be called by themselves.

    Args:
        batch: without scores.
        scorers: called one after the other.
    """
    for scorer in scorers:
        batch = scorer.join(batch, scorer.score(scorer.model, batch))
    return batch


def run_passes(
    model: nn.Module,
    passes: Sequence[Pass[Batch]],
    loss: LossFunction[Batch],
    on_result: Callable[[Pass[Batch], LossResult], None],
    *,
    scorers: Sequence[Scorer[Batch]] = (),
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
        scorers: frozen models, of which the batches that ``loss`` sees have scores.
        gradient_scale: see ``TrainingMesh.gradient_scale``.

    Raises:
        MeshError: if a scorer's model takes all passes at once, and ``model`` does not.
    """
    if isinstance(model, TakesAllPasses):
        for part in _kept_together(passes, scorers, model.least_passes):
            model.run_passes(_scored_ahead(part, scorers), loss, on_result)
        return
    if cut := [s.model for s in scorers if isinstance(s.model, TakesAllPasses)]:
        raise MeshError(
            f"a {type(cut[0]).__name__} scores for a {type(model).__name__}, which is not cut into "
            "stages; load both on one mesh"
        )
    for each in passes:
        result = loss(model, scored(each.batch, scorers))
        on_result(each, result)
        if torch.is_grad_enabled():
            (result.total * (gradient_scale if each.counts else 0.0)).backward()


def _kept_together(
    passes: Sequence[Pass[Batch]], scorers: Sequence[Scorer[Batch]], least: int
) -> Iterator[Sequence[Pass[Batch]]]:
    """Divide the passes of a step so that no more scores are kept than scorers allow."""
    allowed = [scorer.most_kept for scorer in scorers if scorer.most_kept is not None]
    size = max(least, min(allowed)) if allowed else max(1, len(passes))
    for start in range(0, len(passes), size):
        yield passes[start : start + size]


@torch.no_grad()
def _scored_ahead(
    passes: Sequence[Pass[Batch]], scorers: Sequence[Scorer[Batch]]
) -> Sequence[Pass[Batch]]:
    """Return passes whose batches have scores; every rank passes as often."""
    for scorer in scorers:
        frozen = scorer.model
        if isinstance(frozen, TakesAllPasses):
            found = frozen.score_passes(passes, scorer.score)
        else:
            found = [scorer.score(frozen, each.batch) for each in passes]
        passes = [
            replace(each, batch=scorer.join(each.batch, scores))
            for each, scores in zip(passes, found, strict=True)
        ]
    return passes
