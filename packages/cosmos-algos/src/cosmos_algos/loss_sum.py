"""The value of a loss over part of a step: a sum and its weight, never a mean.

Whoever takes the step adds the parts of all micro-batches, ranks and replicas and divides once.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from jaxtyping import Float
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LossSum:
    """A weighted sum of per-token losses, the weight that divides it, and sums to report.

    Attributes:
        total: the sum, with its graph. The loss of a step is Σ total / Σ weight over its parts.
        weight: this part's share of the step's denominator; fixed before any masking.
        metrics: plain sums, without graph, that add over parts; the keys of a loss are the same
            for every batch, empty ones too, so that ranks can reduce them together.
    """

    total: Float[Tensor, ""]
    weight: Float[Tensor, ""]
    metrics: Mapping[str, Float[Tensor, ""]] = field(default_factory=dict[str, Tensor])

    def __add__(self, other: "LossSum") -> "LossSum":
        """Join two parts of a step; a metric that one of them lacks counts as 0 there."""
        metrics = dict(self.metrics)
        for name, value in other.metrics.items():
            metrics[name] = metrics[name] + value if name in metrics else value
        return LossSum(
            total=self.total + other.total, weight=self.weight + other.weight, metrics=metrics
        )
