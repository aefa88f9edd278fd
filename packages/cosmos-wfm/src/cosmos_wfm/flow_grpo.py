"""Flow-GRPO: clipped policy gradient over the noisy steps of a sampler (arXiv 2505.05470).

ratio = exp(log p_θ(x' | x) - log p_old(x' | x)),  L = max(-A ratio, -A clip(ratio, 1 - e, 1 + e))
plus the KL of the two Gaussian steps, ‖μ_θ - μ_ref‖² / (2 s² |Δ|), mean over dimensions. DanceGRPO
is the same loss over steps of constant noise. Guidance, if there is any, is part of the policy:
it is in the rollout and in the loss alike.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from cosmos_algos import ClipConfig, LossSum, clipped_surrogate
from cosmos_wfm.adapter import DiffusionModelAdapter, TextCondition
from cosmos_wfm.errors import WfmConfigError
from cosmos_wfm.flow_matching import LevelCheck, check_rows
from cosmos_wfm.guidance import Guidance, guided_velocity
from cosmos_wfm.policies import Policies
from cosmos_wfm.ranges import check_at_least, check_positive
from cosmos_wfm.sampling import SdeConfig, Transition, log_prob, transition


@dataclass(frozen=True, kw_only=True, slots=True)
class FlowGrpoConfig:
    """Flow-GRPO, and with ``sde.kind = "dance"`` DanceGRPO.

    Attributes:
        clip: e; small, because the log-probability is a mean over dimensions. Samples are trained
            on once: drawn with the very weights that are trained, their ratio is 1, and nothing is
            clipped but what was drawn with older ones (``disaggregated.max_lag``).
        kl: weight of the steps' KL to the reference.
        advantage_clip: advantages beyond this count as this.
        standardise: by the deviation (over n - 1) of ``all`` rewards of the step, or of those of
            the prompt's ``group``; either way the group's own mean is taken off.
        sde: noise of the sampler, and in which steps; a window of early steps is the fast variant.
    """

    kind: Literal["flow_grpo"] = "flow_grpo"
    clip: float = 1e-4
    kl: float = 0.0
    advantage_clip: float = 5.0
    standardise: Literal["all", "group"] = "group"
    sde: SdeConfig = field(default_factory=SdeConfig)

    def __post_init__(self) -> None:
        """Check the ranges.

        Raises:
            WfmConfigError: names the field that is out of range.
        """
        check_positive("flow_grpo", self, "clip", "advantage_clip")
        check_at_least("flow_grpo", self, kl=0)
        if self.sde.eta == 0:
            raise WfmConfigError("flow_grpo: sde.eta is 0, but a step without noise has no density")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StepBatch:
    """Noisy steps that were drawn in rollouts.

    Attributes:
        latents: x, float32.
        following: x' that was drawn, float32.
        sigmas: level of x.
        next_sigmas: level of x'.
        noise_levels: s of each step.
        log_probs: of x' when it was drawn.
        text: embedded prompts.
        negative: what guidance leads away from; ``None`` for no guidance.
        guidance: how far.
        advantages: of the sample that the step belongs to, standardised.
        weights: 1, or 0 for a pass that only keeps step.
        names: of the samples, for messages.
    """

    latents: Float[Tensor, "B C *s"]
    following: Float[Tensor, "B C *s"]
    sigmas: Float[Tensor, " B"]
    next_sigmas: Float[Tensor, " B"]
    noise_levels: Float[Tensor, " B"]
    log_probs: Float[Tensor, " B"]
    text: TextCondition
    negative: TextCondition | None = None
    guidance: Guidance = field(default_factory=lambda: Guidance(1.0))
    advantages: Float[Tensor, " B"]
    weights: Float[Tensor, " B"]
    names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Check shapes.

        Raises:
            WfmConfigError: names what has another one.
        """
        names = ("sigmas", "next_sigmas", "noise_levels", "log_probs", "advantages", "weights")
        rows: dict[str, Tensor] = {name: getattr(self, name) for name in names}
        check_rows(self.latents, {"following": self.following}, rows, self.text)


def flow_grpo_loss(
    adapter: DiffusionModelAdapter, config: FlowGrpoConfig, policies: Policies
) -> Callable[[nn.Module, StepBatch], LossSum]:
    """Return ``loss(transformer, batch)``, a sum over steps for the learner to divide.

    Metrics are sums over steps: ``samples``, ``policy_loss``, ``ratio``, ``clipped`` and ``kl``.
    """
    # a ratio is above 0, so nothing is clipped below where the clip is wider than 1
    clip = ClipConfig(low=min(config.clip, 1.0), high=config.clip)
    check = LevelCheck()

    def loss(transformer: nn.Module, batch: StepBatch) -> LossSum:
        check(batch.sigmas, batch.next_sigmas)

        def step_of(module: nn.Module) -> Transition:
            inputs = (batch.latents, batch.sigmas)
            velocity = guided_velocity(
                adapter, module, inputs, batch.text, batch.negative, batch.guidance
            )
            return transition(
                batch.latents, velocity, batch.sigmas, batch.next_sigmas, batch.noise_levels
            )

        reference: Transition | None = None
        if config.kl > 0:
            with policies.reference() as module:
                reference = step_of(module)
        step = step_of(transformer)
        ratio = (log_prob(batch.following, step) - batch.log_probs).exp()
        advantages = batch.advantages.clamp(-config.advantage_clip, config.advantage_clip)
        policy = clipped_surrogate(ratio[:, None], advantages[:, None], clip).losses[:, 0]
        kl = torch.zeros_like(policy)
        if reference is not None:
            kl = (step.mean - reference.mean).square().flatten(1).mean(1) / (2.0 * step.std**2)
        outside = (ratio - 1.0).abs() > config.clip
        sums = {
            "samples": batch.weights,
            "policy_loss": batch.weights * policy,
            "ratio": batch.weights * ratio,
            "clipped": batch.weights * outside,
            "kl": batch.weights * kl,
        }
        return LossSum(
            total=(batch.weights * (policy + config.kl * kl)).sum(),
            weight=batch.weights.sum(),
            metrics={name: value.detach().sum() for name, value in sums.items()},
        )

    return loss
