"""Advantage-weighted matching: the flow-matching loss of own samples, times their advantage.

L = A ‖v_θ(x_t) - (ε - x_0)‖² with fresh noise on samples of the policy (arXiv 2509.25050).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from cosmos_algos import LossSum
from cosmos_wfm.adapter import DiffusionModelAdapter
from cosmos_wfm.errors import WfmConfigError
from cosmos_wfm.flow_matching import LevelCheck, add_noise
from cosmos_wfm.nft import ForwardBatch
from cosmos_wfm.policies import Policies
from cosmos_wfm.ranges import check_at_least, check_positive


@dataclass(frozen=True, kw_only=True, slots=True)
class AwmConfig:
    """Advantage-weighted matching.

    Attributes:
        kl: weight of the mean of (v - v_ref)².
        advantage_clip: advantages beyond this count as this.
        standardise: by the deviation (over n - 1) of ``all`` rewards of the step, or of those of
            the prompt's ``group``; either way the group's own mean is taken off.
        timestep_fraction: share of the rollout's noise levels that each sample is trained on,
            rounded down; one at least.
    """

    kind: Literal["awm"] = "awm"
    kl: float = 1e-4
    advantage_clip: float = 5.0
    standardise: Literal["all", "group"] = "all"
    timestep_fraction: float = 0.99

    def __post_init__(self) -> None:
        """Check the ranges.

        Raises:
            WfmConfigError: names the field that is out of range.
        """
        check_at_least("awm", self, kl=0)
        check_positive("awm", self, "advantage_clip")
        if not 0 < self.timestep_fraction <= 1:
            raise WfmConfigError(
                f"awm: timestep_fraction is {self.timestep_fraction}; it must be in (0, 1]"
            )


def awm_loss(
    adapter: DiffusionModelAdapter, config: AwmConfig, policies: Policies
) -> Callable[[nn.Module, ForwardBatch], LossSum]:
    """Return ``loss(transformer, batch)``, a sum over samples for the learner to divide.

    Metrics are sums over samples: ``samples``, ``policy_loss`` and ``kl``.
    """
    check = LevelCheck()

    def loss(transformer: nn.Module, batch: ForwardBatch) -> LossSum:
        check(batch.sigmas)
        noisy = add_noise(batch.latents, batch.noise, batch.sigmas)
        reference: Tensor | None = None
        if config.kl > 0:
            with policies.reference() as module:
                reference = adapter.velocity(module, noisy, batch.sigmas, batch.text)
        velocity = adapter.velocity(transformer, noisy, batch.sigmas, batch.text)
        errors = (velocity - (batch.noise - batch.latents)).float().square().flatten(1).mean(1)
        clip = config.advantage_clip
        policy = batch.advantages.clamp(-clip, clip) * errors
        kl = torch.zeros_like(policy)
        if reference is not None:
            kl = (velocity - reference).float().square().flatten(1).mean(1)
        sums = {"samples": batch.weights, "policy_loss": batch.weights * policy}
        return LossSum(
            total=(batch.weights * (policy + config.kl * kl)).sum(),
            weight=batch.weights.sum(),
            metrics={
                **{name: value.detach().sum() for name, value in sums.items()},
                "kl": (batch.weights * kl).detach().sum(),
            },
        )

    return loss
