"""Divergence of the policy from a reference, as a loss whose gradient is that of KL(π‖π_ref).

With Δ = log π - log π_ref: k1 = Δ, k2 = Δ²/2, k3 = e^-Δ - 1 + Δ. As values k1 and k3 are unbiased;
as losses differentiated through log π they are not what they seem: E∇k1 = 0 and
E∇k3 = ∇KL(π_ref‖π), the forward divergence. E∇k2 = ∇KL(π‖π_ref), and so has k3 when it is
multiplied by the likelihood ratio π/sg(π), its score-function factor. Only those two are offered.
"""

from dataclasses import dataclass
from typing import Literal

from jaxtyping import Float
from torch import Tensor

from cosmos_algos.corrections import LOG_RATIO_LIMIT
from cosmos_algos.errors import AlgorithmConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class KlConfig:
    """A penalty on leaving the reference policy.

    Attributes:
        coefficient: β of the penalty; 0 switches it off, and no reference is needed.
        estimator: ``k2`` or ``k3`` (with the score-function factor); the same gradient in
            expectation, k3 with the smaller variance near the reference.
    """

    coefficient: float = 0.0
    estimator: Literal["k2", "k3"] = "k2"

    def __post_init__(self) -> None:
        """Refuse a negative penalty."""
        if self.coefficient < 0.0:
            raise AlgorithmConfigError(f"kl: coefficient {self.coefficient} must not be negative")


def k3(log_ratios: Float[Tensor, "*S"]) -> Float[Tensor, "*S"]:
    """Return e^-Δ - 1 + Δ: unbiased for KL(π‖q) as a value, never negative."""
    clamped = log_ratios.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return (-clamped).expm1() + clamped


def kl_loss(
    logprobs: Float[Tensor, "B T"],
    reference_logprobs: Float[Tensor, "B T"],
    importance: Float[Tensor, "B T"],
    config: KlConfig,
) -> Float[Tensor, "B T"]:
    """Return per-token losses whose expected gradient is ∇KL(π‖π_ref) (not scaled by β).

    Args:
        logprobs: log π, with gradient.
        reference_logprobs: log π_ref.
        importance: π/μ of each token *with its gradient* (its value may be 1), which makes the
            expectation over samples of μ one over π.
        config: which estimator.
    """
    delta = logprobs - reference_logprobs
    if config.estimator == "k2":
        return importance.detach() * 0.5 * delta**2
    return importance * k3(delta)
