"""Weights that correct for samples drawn by another policy than the one that trains.

With μ the behaviour policy and ρ = π_old/μ per token, a correction multiplies a token's loss. It
never carries gradient and never changes the denominator of the step: a token that it masks counts
as one whose loss is 0. What is *left out* for being too far away is in ``rejection``.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from cosmos_algos.arguments import check_choice
from cosmos_algos.errors import AlgorithmConfigError
from cosmos_algos.samples import Samples

LOG_RATIO_LIMIT = 20.0
# ρ of a token, the product over its sample, or that product's T-th root.
RatioLevel = Literal["token", "sequence", "geometric"]


@dataclass(frozen=True, kw_only=True, slots=True)
class NoCorrection:
    """Every weight is 1."""

    kind: Literal["none"] = "none"


@dataclass(frozen=True, kw_only=True, slots=True)
class ImportanceConfig:
    """Plain importance sampling: ρ, however large; E_μ[ρ f] = E_π_old[f].

    Attributes:
        level: whose ratio.
    """

    kind: Literal["importance"] = "importance"
    level: RatioLevel = "token"


@dataclass(frozen=True, kw_only=True, slots=True)
class TisConfig:
    """Truncated importance sampling: min(max(ρ, floor), cap).

    Yao et al., "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training", 2025, for
    engines that sample with other probabilities than the trainer's: min(ρ_t, C).

    Attributes:
        cap: largest weight, commonly 2 to 5.
        floor: smallest weight.
        level: whose ratio; the product over a long sample is nearly always at a bound.
    """

    kind: Literal["tis"] = "tis"
    cap: float = 2.0
    floor: float = 0.0
    level: RatioLevel = "token"

    def __post_init__(self) -> None:
        """Refuse an interval that leaves out ρ = 1."""
        check_interval("correction tis", self.floor, self.cap)


@dataclass(frozen=True, kw_only=True, slots=True)
class IcePopConfig:
    """Masked importance sampling of tokens: ρ where low <= ρ <= high, else 0.

    IcePop (Ring-1T, arXiv 2510.18855): M(ρ_t) = ρ_t within [α, β], else 0.

    Attributes:
        low: smallest ratio kept.
        high: largest ratio kept.
    """

    kind: Literal["icepop"] = "icepop"
    low: float = 0.5
    high: float = 5.0

    def __post_init__(self) -> None:
        """Refuse an interval that leaves out ρ = 1."""
        check_interval("correction icepop", self.low, self.high)


@dataclass(frozen=True, kw_only=True, slots=True)
class MisConfig:
    """Masked importance sampling of samples: Π_t ρ_t where low <= Π_t ρ_t <= high, else 0.

    Liu, Li et al., "When Speed Kills Stability: Demystifying RL Collapse from the
    Training-Inference Mismatch", 2025.

    Attributes:
        low: smallest ratio kept.
        high: largest ratio kept.
        level: ``sequence`` is the product and holds few long samples; ``geometric`` its root.
    """

    kind: Literal["mis"] = "mis"
    low: float = 0.0
    high: float = 3.0
    level: RatioLevel = "sequence"

    def __post_init__(self) -> None:
        """Refuse an interval that leaves out ρ = 1."""
        check_interval("correction mis", self.low, self.high)


CorrectionConfig = NoCorrection | ImportanceConfig | TisConfig | IcePopConfig | MisConfig


def correction_weights(
    log_ratios: Float[Tensor, "B T"], config: CorrectionConfig, samples: Samples | None = None
) -> Float[Tensor, "B T"]:
    """Return the weight of each token from log ρ = log π_old - log μ; detached.

    A log-ratio is clamped to ±20 first, so that a broken log-probability cannot make an infinity.

    Args:
        log_ratios: log ρ of each token.
        config: which correction.
        samples: which tokens belong together; by default a row is a sample and counts whole.

    Raises:
        AlgorithmConfigError: if the configuration names no level of a ratio.
        ShapeError: if the samples are not of these tokens.
    """
    delta = log_ratios.detach()
    samples = samples or Samples(torch.ones_like(delta, dtype=torch.bool))
    samples.check("correction", {"log_ratios": log_ratios})
    match config:
        case NoCorrection():
            return torch.ones_like(delta)
        case ImportanceConfig(level=level):
            return ratios_at(level, delta, samples)
        case TisConfig(cap=cap, floor=floor, level=level):
            return ratios_at(level, delta, samples).clamp(floor, cap)
        case IcePopConfig(low=low, high=high):
            ratios = ratios_at("token", delta, samples)
        case MisConfig(low=low, high=high, level=level):
            ratios = ratios_at(level, delta, samples)
    return ratios * ((ratios >= low) & (ratios <= high))


def ratios_at(
    level: RatioLevel, log_ratios: Float[Tensor, "B T"], samples: Samples
) -> Float[Tensor, "B T"]:
    """Return ρ_t, Π_t ρ_t or (Π_t ρ_t)^(1/T) at every token, between e^-20 and e^20.

    Raises:
        AlgorithmConfigError: if there is no such level.
    """
    check_choice("level of a ratio", level, RatioLevel)
    if level == "sequence":
        log_ratios = samples.sums(log_ratios)
    elif level == "geometric":
        log_ratios = samples.means(log_ratios)
    return log_ratios.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def check_interval(subject: str, low: float, high: float) -> None:
    """Refuse bounds of a ratio that leave out 1.

    Raises:
        AlgorithmConfigError: names the subject and its bounds.
    """
    if not 0.0 <= low <= 1.0 <= high:
        raise AlgorithmConfigError(f"{subject}: [{low}, {high}] must contain 1")
