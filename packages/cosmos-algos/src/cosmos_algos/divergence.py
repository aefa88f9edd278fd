"""Divergence of the policy from a reference, with the gradient of KL(π‖π_ref).

With Δ = log π - log π_ref: k1 = Δ, k2 = Δ²/2, k3 = e^-Δ - 1 + Δ. As values k1 and k3 are unbiased;
as losses differentiated through log π they are not what they seem: E∇k1 = 0 and
E∇k3 = ∇KL(π_ref‖π), the forward divergence. E∇k2 = ∇KL(π‖π_ref), and so have k1 and k3 when they
are multiplied by the likelihood ratio π/sg(π), their score-function factor.

In a loss, a token answers for its own divergence. In the reward it answers for that of all tokens
after it too, which makes the gradient that of the divergence of whole *sequences*; an estimator
that depends on π beyond the sampling (k3) then keeps its plain gradient besides.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from cosmos_algos.arguments import (
    check_choice,
    check_coefficients,
    check_fractions,
    check_same_rank,
    check_same_shape,
)
from cosmos_algos.corrections import LOG_RATIO_LIMIT
from cosmos_algos.errors import AlgorithmConfigError
from cosmos_algos.samples import Samples
from cosmos_algos.token_advantages import returns_to_go

KlEstimator = Literal["k1", "k2", "k3"]


@dataclass(frozen=True, kw_only=True, slots=True)
class KlConfig:
    """A penalty on leaving the reference policy.

    Attributes:
        coefficient: β of the penalty; 0 switches it off, and no reference is needed.
        estimator: ``k2``, or ``k1`` or ``k3`` with the score-function factor; the same gradient
            in expectation, k3 with the smallest variance near the reference.
        place: ``loss``: the divergence of each token's distribution; ``reward``: of the sequence,
            taken off the advantages as a return-to-go. k2 is no divergence as a value, so it is
            for the loss only.
        discount: γ of the return-to-go.
        reset_every: steps after which the present policy becomes the reference; 0 keeps the first.
    """

    coefficient: float = 0.0
    estimator: KlEstimator = "k2"
    place: Literal["loss", "reward"] = "loss"
    discount: float = 1.0
    reset_every: int = 0

    def __post_init__(self) -> None:
        """Refuse a negative penalty, and k2 as a value."""
        check_choice("kl: estimator", self.estimator, KlEstimator)
        check_choice("kl: place", self.place, Literal["loss", "reward"])
        check_coefficients("kl", {"coefficient": self.coefficient})
        if self.place == "reward" and self.estimator == "k2":
            raise AlgorithmConfigError(
                "kl: estimator 'k2' is not the divergence as a value, so a reward of it has "
                "another gradient; use 'k1' or 'k3' with place 'reward'"
            )
        check_fractions("kl", {"discount": self.discount})
        if self.reset_every < 0:
            raise AlgorithmConfigError(f"kl: reset_every {self.reset_every} must not be negative")

    def reference_version(self, version: int) -> int:
        """Return the weight version that is the reference of the step that starts from ``version``.

        Resetting the reference to the policy lets a long run go on moving (ProRL,
        arXiv 2505.24864).
        """
        return version - version % self.reset_every if self.reset_every else 0


def k3(log_ratios: Float[Tensor, "*S"]) -> Float[Tensor, "*S"]:
    """Return e^-Δ - 1 + Δ: unbiased for KL(π‖q) as a value, never negative."""
    clamped = log_ratios.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return (-clamped).expm1() + clamped


def kl_values(
    logprobs: Float[Tensor, "*S"], reference_logprobs: Float[Tensor, "*S"], estimator: KlEstimator
) -> Float[Tensor, "*S"]:
    """Return the estimate of each token (Schulman, "Approximating KL divergence", 2020).

    Raises:
        AlgorithmConfigError: if there is no such estimator.
        ShapeError: if the two have different shapes.
    """
    check_choice("kl: estimator", estimator, KlEstimator)
    tensors = {"logprobs": logprobs, "reference_logprobs": reference_logprobs}
    check_same_shape("kl", tensors)
    delta = logprobs - reference_logprobs
    match estimator:
        case "k1":
            return delta
        case "k2":
            return 0.5 * delta**2
        case "k3":
            return k3(delta)


def kl_loss(
    logprobs: Float[Tensor, "B T"],
    reference_logprobs: Float[Tensor, "B T"],
    importance: Float[Tensor, "B T"],
    config: KlConfig,
) -> Float[Tensor, "B T"]:
    """Return per-token losses whose expected gradient is ∇KL(π‖π_ref) (not scaled by β).

    sg(π/μ) k2, or (π/μ) k1 and (π/μ) k3: the factor that is left out where an estimate is
    differentiated as if it were a loss (Tang and Munos, arXiv 2506.09477). With k3 it is the
    unbiased estimate of DeepSeek-V3.2 (arXiv 2512.02556).

    Args:
        logprobs: log π, with gradient.
        reference_logprobs: log π_ref.
        importance: π/μ of each token *with its gradient* (its value may be 1), which makes the
            expectation over samples of μ one over π.
        config: which estimator.

    Raises:
        ShapeError: if the three do not lie over each other.
    """
    check_same_rank("kl", {"logprobs": logprobs, "importance": importance})
    values = kl_values(logprobs, reference_logprobs, config.estimator)
    return (importance.detach() if config.estimator == "k2" else importance) * values


def kl_reward(
    logprobs: Float[Tensor, "B T"],
    reference_logprobs: Float[Tensor, "B T"],
    samples: Samples,
    config: KlConfig,
) -> Float[Tensor, "B T"]:
    """Return what a KL penalty in the reward adds to each advantage: -β Σ_{s≥t} γ^(s-t) k_s.

    A token answers for what follows from it, which a loss of each token leaves out (Tang and
    Munos, arXiv 2506.09477). No gradient passes through it. With k3 the gradient of the divergence
    has a second term, the plain gradient of k3, which the objective adds to the loss.

    Raises:
        ShapeError: if there is not one log-probability of each for each token.
    """
    values = kl_values(logprobs.detach(), reference_logprobs, config.estimator)
    samples.check("kl", {"logprobs": logprobs})
    values = values.where(samples.trainable, 0.0)
    return -config.coefficient * returns_to_go(values, samples, config.discount)


def pathwise_kl(
    logprobs: Float[Tensor, "B T"], reference_logprobs: Float[Tensor, "B T"], config: KlConfig
) -> Float[Tensor, "B T"]:
    """Return the loss that a penalty in the reward leaves over: k3 itself, nothing for k1."""
    if config.estimator == "k1":
        return torch.zeros_like(logprobs)
    return kl_values(logprobs, reference_logprobs, config.estimator)
