"""What a step or a validation pass came to."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Outcome = Literal["updated", "no_weight", "non_finite"]


@dataclass(frozen=True, kw_only=True, slots=True)
class StepReport:
    """One step, the same on every rank of every replica except as said.

    Attributes:
        outcome: ``updated``; ``no_weight`` when nothing was trainable anywhere, or
            ``non_finite``: in both the weights, optimizer and schedule are untouched.
        loss: global ``total / weight``; 0 without weight.
        weight: global weight.
        grad_norm: global norm of the normalised gradient before clipping; 0 without weight.
        lr: learning rate of this step.
        metrics: global sums, as the loss returned them.
        num_passes: forward and backward passes that each rank of this replica made.
        seconds: wall clock of the step on this rank.
        num_skipped: steps so far whose loss or gradient was not finite, this one included.
        problem: what was not finite, if something was: the loss or the gradients of which
            micro-batch, of which samples, on which rank, and where that was written down.
    """

    outcome: Outcome
    loss: float
    weight: float
    grad_norm: float
    lr: float
    metrics: Mapping[str, float]
    num_passes: int
    seconds: float
    num_skipped: int = 0
    problem: str = ""

    def mean(self, name: str, *, over: str | None = None) -> float:
        """Return metric ``name`` divided by metric ``over`` (the weight when ``None``), or 0."""
        divisor = self.weight if over is None else self.metrics[over]
        return self.metrics[name] / divisor if divisor else 0.0

    def per_second(self, name: str) -> float:
        """Return metric ``name``, such as a number of tokens, per second of this step."""
        return self.metrics[name] / self.seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """A loss over some batches, without training.

    Attributes:
        loss: global ``total / weight``; 0 without weight.
        weight: global weight.
        metrics: global sums, as the loss returned them.
    """

    loss: float
    weight: float
    metrics: Mapping[str, float]
