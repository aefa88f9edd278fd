"""DiffusionNFT: RL in the forward process (Zheng et al., arXiv 2509.16117).

From an optimality probability r of each sample, positive and negative policies are implied

    v⁺ = (1 - β) v_old + β v,   v⁻ = (1 + β) v_old - β v,
    L  = r ‖v⁺ - v‖² + (1 - r) ‖v⁻ - v‖²      on x_t of samples of the old policy,

here as the authors train it: in x_0, each part divided by its own mean error (the adaptive
weighting). At v = v_old the gradient is that of (2 r - 1) ‖x̂ - x_0‖² / w whatever β is: advantage-
weighted matching. The optimum of the plain form is v_old + (2/β) (E[r v | x] - E[r | x] v_old).
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from cosmos_algos import LossSum
from cosmos_wfm.adapter import DiffusionModelAdapter, TextCondition
from cosmos_wfm.errors import WfmConfigError
from cosmos_wfm.flow_matching import LevelCheck, add_noise, check_rows, per_sample
from cosmos_wfm.policies import Policies
from cosmos_wfm.ranges import check_at_least, check_finite, check_positive

_SMALLEST_ERROR = 1e-5


@dataclass(frozen=True, kw_only=True, slots=True)
class OldPolicyDecay:
    """How slowly the old policy follows: decay after step i is min(rate · max(0, i - wait), most).

    Attributes:
        rate: growth per step; 0 keeps the decay at 0, so that the old policy is the newest.
        wait: steps before it grows.
        most: largest decay, below 1, at which the old policy would never move again.
    """

    rate: float = 0.001
    wait: int = 0
    most: float = 0.5

    def __post_init__(self) -> None:
        """Check the ranges.

        Raises:
            WfmConfigError: names the field that is out of range.
        """
        check_at_least("nft.decay", self, rate=0, wait=0)
        if not 0.0 <= self.most < 1.0:
            raise WfmConfigError(f"nft.decay: most is {self.most}; it must be from 0 to below 1")

    def at(self, step: int) -> float:
        """Return the decay after step ``step``, counted from 1."""
        return min(self.rate * max(0, step - self.wait), self.most)


@dataclass(frozen=True, kw_only=True, slots=True)
class NftConfig:
    """DiffusionNFT.

    Attributes:
        beta: distance between the implied policies; above 0.
        kl: weight of the mean of (v - v_ref)², which is not in the paper but keeps training from
            collapse.
        advantage_clip: advantages beyond this count as this; r = 1/2 + A / (2 · clip). The policy's
            loss is multiplied by it, so that at the old policy its gradient has the weight A.
        standardise: by the deviation (over n - 1) of ``all`` rewards of the step, or of those of
            the prompt's ``group``; either way the group's own mean is taken off.
        timestep_fraction: share of the rollout's noise levels that each sample is trained on,
            rounded down; one at least.
        decay: of the old policy.
    """

    kind: Literal["nft"] = "nft"
    beta: float = 1.0
    kl: float = 1e-4
    advantage_clip: float = 5.0
    standardise: Literal["all", "group"] = "all"
    timestep_fraction: float = 0.99
    decay: OldPolicyDecay = field(default_factory=OldPolicyDecay)

    def __post_init__(self) -> None:
        """Check the ranges.

        Raises:
            WfmConfigError: names the field that is out of range.
        """
        check_positive("nft", self, "beta", "advantage_clip")
        check_finite("nft", self, "beta", "advantage_clip")
        check_at_least("nft", self, kl=0)
        if not 0 < self.timestep_fraction <= 1:
            raise WfmConfigError(
                f"nft: timestep_fraction is {self.timestep_fraction}; it must be in (0, 1]"
            )

    def optimality(self, advantages: Float[Tensor, " B"]) -> Float[Tensor, " B"]:
        """Return r in [0, 1] of advantages."""
        clipped = advantages.clamp(-self.advantage_clip, self.advantage_clip)
        return 0.5 + 0.5 * clipped / self.advantage_clip


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ForwardBatch:
    """Samples of the old policy, noised anew: what forward-process methods train on.

    Attributes:
        latents: x_0, as sampled.
        noise: fresh ε.
        sigmas: noise level of each sample.
        text: embedded prompts.
        advantages: of each sample, standardised.
        weights: 1, or 0 for a pass that only keeps step.
        names: of the samples, for messages.
    """

    latents: Float[Tensor, "B C *s"]
    noise: Float[Tensor, "B C *s"]
    sigmas: Float[Tensor, " B"]
    text: TextCondition
    advantages: Float[Tensor, " B"]
    weights: Float[Tensor, " B"]
    names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Check shapes.

        Raises:
            WfmConfigError: names what has another one.
        """
        rows = {"sigmas": self.sigmas, "advantages": self.advantages, "weights": self.weights}
        check_rows(self.latents, {"noise": self.noise}, rows, self.text)


def nft_errors(
    velocity: Float[Tensor, "B C *s"],
    old_velocity: Float[Tensor, "B C *s"],
    batch: ForwardBatch,
    optimality: Float[Tensor, " B"],
    beta: float,
) -> Float[Tensor, " B"]:
    """Return [r e⁺/w⁺ + (1 - r) e⁻/w⁻] / β of each sample, in float64.

    e± is the mean squared error of x̂± = x_t - t v± as a prediction of x_0, and w± = mean |x̂± - x_0|
    without gradient.
    """
    noisy = add_noise(batch.latents, batch.noise, batch.sigmas).double()
    level, clean = per_sample(batch.sigmas.double(), noisy), batch.latents.double()
    new, old = velocity.double(), old_velocity.double()
    errors: list[Tensor] = []
    for sign in (1.0, -1.0):
        implied = old + sign * beta * (new - old)
        difference = (noisy - level * implied - clean).flatten(1)
        width = difference.detach().abs().mean(1).clamp_min(_SMALLEST_ERROR)
        errors.append(difference.square().mean(1) / width)
    r = optimality.double()
    return (r * errors[0] + (1.0 - r) * errors[1]) / beta


def nft_loss(
    adapter: DiffusionModelAdapter, config: NftConfig, policies: Policies
) -> Callable[[nn.Module, ForwardBatch], LossSum]:
    """Return ``loss(transformer, batch)``, a sum over samples for the learner to divide.

    Metrics are sums over samples: ``samples``, ``policy_loss``, ``old_deviation`` (mean squared
    distance to the old policy) and ``kl`` (to the reference; 0 without ``config.kl``).
    """
    check = LevelCheck()

    def loss(transformer: nn.Module, batch: ForwardBatch) -> LossSum:
        check(batch.sigmas)
        noisy = add_noise(batch.latents, batch.noise, batch.sigmas)

        def predict(module: nn.Module) -> Tensor:
            return adapter.velocity(module, noisy, batch.sigmas, batch.text)

        with policies.old() as module:
            old = predict(module)
        reference: Tensor | None = None
        if config.kl > 0:
            with policies.reference() as module:
                reference = predict(module)
        velocity = predict(transformer)
        optimality = config.optimality(batch.advantages)
        policy = nft_errors(velocity, old, batch, optimality, config.beta) * config.advantage_clip
        total, kl = policy, torch.zeros_like(policy)
        if reference is not None:
            kl = _distances(velocity, reference)
            total = policy + config.kl * kl
        weights = batch.weights.double()
        sums = {
            "samples": weights,
            "policy_loss": weights * policy,
            "old_deviation": weights * _distances(velocity, old),
            "kl": weights * kl,
        }
        return LossSum(
            total=(weights * total).sum(),
            weight=weights.sum(),
            metrics={name: value.detach().sum() for name, value in sums.items()},
        )

    return loss


def _distances(one: Float[Tensor, "B ..."], other: Float[Tensor, "B ..."]) -> Float[Tensor, " B"]:
    return (one.double() - other.double()).square().flatten(1).mean(1)
