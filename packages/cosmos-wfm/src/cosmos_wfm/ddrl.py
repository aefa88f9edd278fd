"""DDRL: RL with a forward KL to data instead of a reverse KL to a reference (arXiv 2512.04332).

    J = E_{p_θ} λ((r - Z) / β) - KL(p_data ‖ p_θ),     λ(x) = -exp(-x)

The forward KL is the flow-matching loss on data. Setting ∂J/∂p = λ + p_data / p to 0 gives
p = p_data exp((r - Z) / β), normalised by Z = β log E_data exp(r / β); over samples of that p
itself it is Z = -β log E_p exp(-r / β), which is what a group of own samples is asked here. With it
the mean of λ over the group is -1, and the advantage is 1 - exp(-(r - Z) / β).

λ is as low as -K in a group of K. That it is cut is not in J, but in the authors' training code,
at -5; here as well (``policy.advantage_clip``), before the mean is taken off, so that the
advantages of a group have the mean 0 whatever is cut.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from cosmos_algos import LossSum, grpo_advantages
from cosmos_wfm.adapter import DiffusionModelAdapter
from cosmos_wfm.flow_grpo import FlowGrpoConfig, StepBatch, flow_grpo_loss
from cosmos_wfm.flow_matching import FlowBatch, FlowMatchingConfig, flow_matching_loss
from cosmos_wfm.policies import Policies
from cosmos_wfm.ranges import check_at_least, check_finite, check_positive, check_unused


@dataclass(frozen=True, kw_only=True, slots=True)
class DdrlConfig:
    """DDRL.

    Attributes:
        form: ``paper``: λ(x) = -exp(-x) of the reward; ``shortcut``: the group's z-scores.
        beta: temperature of the reward in ``paper``; refused with ``shortcut``.
        data_weight: of the flow-matching loss on data, of which every noisy step of a rollout has a
            sample; a tenth of them is without prompt, and where the model takes given frames, each
            has from none to two.
        flow: noise levels and weights of that loss.
        policy: clipping, noise, and KL, which is 0 as the data stands for it. ``advantage_clip``
            cuts λ in ``paper`` and z-scores in ``shortcut``; ``standardise`` can only be ``group``.
    """

    kind: Literal["ddrl"] = "ddrl"
    form: Literal["paper", "shortcut"] = "paper"
    beta: float = 1.0
    data_weight: float = 0.01
    flow: FlowMatchingConfig = field(default_factory=FlowMatchingConfig)
    policy: FlowGrpoConfig = field(default_factory=FlowGrpoConfig)

    def __post_init__(self) -> None:
        """Check the ranges.

        Raises:
            WfmConfigError: names the field that is out of range.
        """
        check_positive("ddrl", self, "beta")
        check_finite("ddrl", self, "beta")
        check_at_least("ddrl", self, data_weight=0)
        if self.form != "paper":
            check_unused("ddrl", self, {"beta": 1.0}, "form = paper")
        check_unused("ddrl.policy", self.policy, {"standardise": "group"}, "kind = flow_grpo")

    def advantages(
        self, rewards: Float[Tensor, " N"], groups: Int64[Tensor, " N"]
    ) -> Float[Tensor, " N"]:
        """Return the advantages of one step's samples in this form; rewards may be NaN."""
        if self.form == "shortcut":
            return grpo_advantages(rewards, groups).float()
        result = torch.full_like(rewards, math.nan)
        present = ~rewards.isnan()
        for group in groups[present].unique():
            mine = (groups == group) & present
            own = exponential_advantages(rewards[mine], self.beta, self.policy.advantage_clip)
            result[mine] = own
        return result


def exponential_advantages(
    rewards: Float[Tensor, " K"], beta: float, clip: float = math.inf
) -> Float[Tensor, " K"]:
    """Return λ((r - Z)/β) less its mean over a group; the mean of what is returned is 0.

    Args:
        rewards: of a group.
        beta: their temperature.
        clip: λ below -clip counts as that; without, the result is 1 - exp(-(r - Z)/β).
    """
    scaled = -rewards.double() / beta
    log_mean = torch.logsumexp(scaled, dim=0) - math.log(len(scaled))  # -Z/β
    transformed = -(scaled - log_mean).exp().clamp_max(clip)
    return (transformed - transformed.mean()).to(rewards.dtype)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class DdrlBatch:
    """Noisy steps of rollouts, and as many samples of data.

    Attributes:
        steps: what the policy gradient is taken over.
        data: what the model must stay likely for.
    """

    steps: StepBatch
    data: FlowBatch

    @property
    def names(self) -> tuple[str, ...]:
        """Of the samples and their data, for messages."""
        return (*self.steps.names, *self.data.names)


def ddrl_loss(
    adapter: DiffusionModelAdapter, config: DdrlConfig, policies: Policies
) -> Callable[[nn.Module, DdrlBatch], LossSum]:
    """Return ``loss(transformer, batch)``: policy + data_weight · data, a sum over pairs.

    Metrics are those of both parts; ``data_loss`` is the velocity error on data.
    """
    policy_loss = flow_grpo_loss(adapter, config.policy, policies)
    data_loss = flow_matching_loss(adapter, config.flow)

    def loss(transformer: nn.Module, batch: DdrlBatch) -> LossSum:
        policy = policy_loss(transformer, batch.steps)
        data = data_loss(transformer, batch.data)
        return LossSum(
            total=policy.total + config.data_weight * data.total,
            weight=policy.weight,
            metrics={**policy.metrics, "data_loss": data.metrics["velocity_error"]},
        )

    return loss
