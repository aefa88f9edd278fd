"""Policy losses: what a token's probability ratio and advantage become.

With r = π/anchor: the anchor is the policy at the start of the step or the one that sampled, which
the objective decides. Each loss returns its per-token values, and where it held the ratio back.
"""

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from cosmos_algos.arguments import check_choice, check_same_rank
from cosmos_algos.corrections import LOG_RATIO_LIMIT
from cosmos_algos.errors import AlgorithmConfigError
from cosmos_algos.samples import Samples


@dataclass(frozen=True, kw_only=True, slots=True)
class ClipConfig:
    """PPO: -min(rA, clip(r)A); where the ratio r = π/anchor stops to matter.

    Attributes:
        low: r is clipped below at 1 - low.
        high: and above at 1 + high; larger than ``low`` is DAPO's clip-higher.
        dual: c > 1 of the dual clip, which bounds the loss of a negative advantage at -cA;
            0 leaves it unbounded.
    """

    kind: Literal["clip"] = "clip"
    low: float = 0.2
    high: float = 0.2
    dual: float = 0.0

    def __post_init__(self) -> None:
        """Refuse ranges that do not contain 1."""
        _check_clip("clip", self.low, self.high)
        if self.dual and not self.dual > 1.0:
            raise AlgorithmConfigError(f"clip: dual {self.dual} must be over 1, or 0 for none")


@dataclass(frozen=True, kw_only=True, slots=True)
class GspoClip:
    """GSPO: the clip acts on a sample's geometric mean ratio s = (Π_t r_t)^(1/T).

    Attributes:
        low: s is clipped below at 1 - low.
        high: and above at 1 + high.
        level: ``sequence`` differentiates s; ``token`` is sg(s) r/sg(r), which has the same
            gradient where the advantage is one number and allows one per token.
    """

    kind: Literal["gspo"] = "gspo"
    low: float = 3e-4
    high: float = 4e-4
    level: Literal["sequence", "token"] = "sequence"

    def __post_init__(self) -> None:
        """Refuse ranges that do not contain 1."""
        check_choice("gspo: level", self.level, Literal["sequence", "token"])
        _check_clip("gspo", self.low, self.high)


@dataclass(frozen=True, kw_only=True, slots=True)
class CispoClip:
    """CISPO: -sg(clip(r, floor, cap)) A log π; a clipped token keeps its gradient.

    Attributes:
        cap: largest weight itself, not its distance to 1 (1 + ε_high in the paper).
        floor: smallest weight (1 - ε_low); 0, as published, never binds.
    """

    kind: Literal["cispo"] = "cispo"
    cap: float = 5.0
    floor: float = 0.0

    def __post_init__(self) -> None:
        """Refuse a cap that would shrink every gradient, as an ε in its place does."""
        if not 0.0 <= self.floor <= 1.0 <= self.cap:
            raise AlgorithmConfigError(
                f"cispo: weights in [{self.floor}, {self.cap}] must contain 1; cap is the largest "
                "weight, 1 + ε_high"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class AipoClip:
    """AIPO (LlamaRL): -sg(min(π/μ, ρ)) A log π; every token keeps a gradient.

    Attributes:
        rho: largest weight, 2 to 10 in the paper.
        gradient: ``everywhere`` as published; ``below_rho`` differentiates min(π/μ, ρ) itself, so
            that tokens above ρ have none: a form that is in use under the same name.
    """

    kind: Literal["aipo"] = "aipo"
    rho: float = 5.0
    gradient: Literal["everywhere", "below_rho"] = "everywhere"

    def __post_init__(self) -> None:
        """Refuse a bound that would shrink on-policy gradients."""
        check_choice("aipo: gradient", self.gradient, Literal["everywhere", "below_rho"])
        if not self.rho >= 1.0:
            raise AlgorithmConfigError(f"aipo: rho {self.rho} must be at least 1")


@dataclass(frozen=True, kw_only=True, slots=True)
class SapoGate:
    """SAPO: -(4/τ) σ(τ (r - 1)) A; a smooth gate in place of a clip, slope 1 at r = 1.

    Attributes:
        positive: τ where the advantage is above 0.
        negative: τ elsewhere; larger, as pushing down is what destabilises.
    """

    kind: Literal["sapo"] = "sapo"
    positive: float = 1.0
    negative: float = 1.05

    def __post_init__(self) -> None:
        """Refuse temperatures that have no gate."""
        if not (0.0 < self.positive < math.inf and 0.0 < self.negative < math.inf):
            raise AlgorithmConfigError(
                f"sapo: temperatures {self.positive} and {self.negative} must be above 0 and finite"
            )


SurrogateConfig = ClipConfig | GspoClip | CispoClip | AipoClip | SapoGate


class Surrogate(NamedTuple):
    """Per-token losses, and where the ratio was held back (clipped, capped or without gradient)."""

    losses: Float[Tensor, "B T"]
    clipped: Bool[Tensor, "B T"]


def policy_surrogate(
    logprobs: Float[Tensor, "B T"],
    anchor: Float[Tensor, "B T"],
    advantages: Float[Tensor, "B T"],
    samples: Samples,
    config: SurrogateConfig,
) -> Surrogate:
    """Return the per-token policy loss of a batch.

    Args:
        logprobs: log π, with gradient.
        anchor: log-probabilities that the ratio is over, without.
        advantages: of each token.
        samples: which tokens belong together.
        config: which loss.

    Raises:
        ShapeError: if advantages are of samples and not of tokens, or samples of others.
    """
    tensors = {"logprobs": logprobs, "anchor": anchor, "advantages": advantages}
    check_same_rank("policy loss", tensors)
    samples.check("policy loss", {"logprobs": logprobs})
    log_ratios = (logprobs - anchor).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    match config:
        case ClipConfig():
            return clipped_surrogate(log_ratios.exp(), advantages, config)
        case GspoClip():
            return gspo_surrogate(log_ratios, advantages, samples, config)
        case CispoClip():
            weights = log_ratios.detach().exp()
            return capped_surrogate(logprobs, weights, advantages, (config.floor, config.cap))
        case AipoClip(gradient="everywhere"):
            weights = log_ratios.detach().exp()
            return capped_surrogate(logprobs, weights, advantages, (0.0, config.rho))
        case AipoClip():
            ratios = log_ratios.exp()
            return Surrogate(-ratios.clamp(max=config.rho) * advantages, ratios > config.rho)
        case SapoGate():
            return sapo_surrogate(log_ratios.exp(), advantages, config)


def clipped_surrogate(
    ratios: Float[Tensor, "B T"], advantages: Float[Tensor, "B T"], clip: ClipConfig
) -> Surrogate:
    """Return per-token losses -min(rA, clip(r)A) and where clipping took the gradient away.

    PPO (arXiv 1707.06347, eq. 7), clip-higher (DAPO, arXiv 2503.14476, eq. 10), dual clip
    (arXiv 1912.09729, eq. 3).

    Raises:
        ShapeError: if advantages are of samples and not of tokens.
    """
    check_same_rank("clipped surrogate", {"ratios": ratios, "advantages": advantages})
    free = -ratios * advantages
    bounded = -ratios.clamp(1.0 - clip.low, 1.0 + clip.high) * advantages
    losses = torch.maximum(free, bounded)
    clipped = bounded > free
    if clip.dual:
        ceiling = -clip.dual * advantages
        dual = (advantages < 0.0) & (losses > ceiling)
        losses = torch.where(dual, ceiling, losses)
        clipped = clipped | dual
    return Surrogate(losses, clipped)


def gspo_surrogate(
    log_ratios: Float[Tensor, "B T"],
    advantages: Float[Tensor, "B T"],
    samples: Samples,
    config: GspoClip,
) -> Surrogate:
    """Return -min(sA, clip(s)A) at every token of a sample, s = exp(mean_t log r_t).

    GSPO (arXiv 2507.18071, eq. 5 and 7), and its token variant sg(s) r/sg(r) (eq. 13 and 14).
    Averaged over the tokens of a sample, which ``sequence_mean`` does, this is the sample's loss.
    """
    means = samples.means(log_ratios)
    if config.level == "token":
        means = means.detach() + log_ratios - log_ratios.detach()
    clip = ClipConfig(low=config.low, high=config.high)
    return clipped_surrogate(means.exp(), advantages, clip)


def capped_surrogate(
    logprobs: Float[Tensor, "B T"],
    weights: Float[Tensor, "B T"],
    advantages: Float[Tensor, "B T"],
    bounds: tuple[float, float],
) -> Surrogate:
    """Return -sg(clip(w, low, high)) A log π: REINFORCE with a bounded importance weight.

    CISPO (MiniMax-M1, arXiv 2506.13585, eq. 4 and 5); with w = π/μ and no lower bound AIPO
    (LlamaRL, arXiv 2505.24034: Σ_t min(π/μ, ρ) A ∇log π). No token loses its gradient.
    """
    held = weights.detach().clamp(*bounds)
    return Surrogate(-held * advantages * logprobs, held != weights)


def sapo_surrogate(
    ratios: Float[Tensor, "B T"], advantages: Float[Tensor, "B T"], gate: SapoGate
) -> Surrogate:
    """Return -(4/τ) σ(τ (r - 1)) A, τ by the sign of A (SAPO, arXiv 2511.20347, eq. 5 and 6)."""
    negative = torch.full_like(advantages, gate.negative)
    temperature = negative.masked_fill(advantages > 0.0, gate.positive)
    losses = -(4.0 / temperature) * torch.sigmoid(temperature * (ratios - 1.0)) * advantages
    return Surrogate(losses, torch.zeros_like(advantages, dtype=torch.bool))


def _check_clip(subject: str, low: float, high: float) -> None:
    if not (0.0 <= low <= 1.0 and high >= 0.0):
        raise AlgorithmConfigError(
            f"{subject}: low {low} must be in [0, 1] and high {high} at least 0"
        )
