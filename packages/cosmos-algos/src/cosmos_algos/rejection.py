"""Tokens and samples that are left out because they are too far from the policy that trains.

A rejection is a mask over tokens, on top of a correction's weights. Like those it has no gradient
and leaves the denominator of the step as it was.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from cosmos_algos.corrections import LOG_RATIO_LIMIT, RatioLevel, check_interval, ratios_at
from cosmos_algos.errors import AlgorithmConfigError
from cosmos_algos.samples import Samples


class Distances(NamedTuple):
    """How far the tokens of a batch are from the policy that trains.

    Attributes:
        proximal: log π_old - log μ, the policy at the start of the step against the sampler.
        current: log π - log μ, the policy as it is.
        advantages: of each token.
        lags: versions between the one that sampled and the one that trains.
    """

    proximal: Float[Tensor, "B T"]
    current: Float[Tensor, "B T"]
    advantages: Float[Tensor, "B T"]
    lags: Int[Tensor, "B T"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RatioMask:
    """Keep what has ρ = π_old/μ within bounds.

    ``geometric`` is exp((1/T) Σ_t log ρ_t), which with the default bounds is Geo-mask and does not
    shrink with length; ``sequence`` is the product; ``token`` decides for each token. Liu, Li et
    al., "When Speed Kills Stability: Demystifying RL Collapse from the Training-Inference
    Mismatch", 2025, part 3.

    Attributes:
        level: whose ratio.
        low: smallest kept.
        high: largest kept.
    """

    kind: Literal["ratio"] = "ratio"
    level: RatioLevel = "geometric"
    low: float = 0.999
    high: float = 1.002

    def __post_init__(self) -> None:
        """Refuse an interval that leaves out ρ = 1."""
        check_interval("rejection ratio", self.low, self.high)


@dataclass(frozen=True, kw_only=True, slots=True)
class WorstTokenMask:
    """Keep a sample only if low <= ρ_t <= high for *every* token t of it.

    The veto of verl's rollout correction, which has the lower bound alone.

    Attributes:
        low: smallest kept.
        high: largest kept.
    """

    kind: Literal["worst_token"] = "worst_token"
    low: float = 1e-4
    high: float = 1e4

    def __post_init__(self) -> None:
        """Refuse an interval that leaves out ρ = 1."""
        check_interval("rejection worst_token", self.low, self.high)


@dataclass(frozen=True, kw_only=True, slots=True)
class OffPolicyMask:
    """Leave out a sample with A < 0 and (1/T) Σ_t (log μ - log π) > δ.

    Off-policy sequence masking (DeepSeek-V3.2, arXiv 2512.02556): what the policy has already
    moved away from need not be pushed further.

    Attributes:
        bound: δ, in nats per token.
    """

    kind: Literal["off_policy"] = "off_policy"
    bound: float = 0.1

    def __post_init__(self) -> None:
        """Refuse a bound that leaves out samples of the policy itself."""
        if not self.bound > 0.0:
            raise AlgorithmConfigError(f"rejection off_policy: bound {self.bound} must be above 0")


@dataclass(frozen=True, kw_only=True, slots=True)
class StalenessMask:
    """Leave out tokens sampled more than so many versions ago.

    Attributes:
        max_lag: largest lag kept.
    """

    kind: Literal["staleness"] = "staleness"
    max_lag: int = 8

    def __post_init__(self) -> None:
        """Refuse a bound that leaves out everything."""
        if self.max_lag < 0:
            raise AlgorithmConfigError(f"rejection staleness: max_lag {self.max_lag} is negative")


RejectionConfig = RatioMask | WorstTokenMask | OffPolicyMask | StalenessMask


def kept_tokens(
    distances: Distances, samples: Samples, rejections: Sequence[RejectionConfig]
) -> Bool[Tensor, "B T"]:
    """Return which trainable tokens no rejection leaves out.

    Raises:
        ShapeError: if there is not one distance for each token.
    """
    samples.check("rejections", distances._asdict())
    kept = samples.trainable
    for rejection in rejections:
        kept = kept & _kept(distances, samples, rejection)
    return kept


def _kept(
    distances: Distances, samples: Samples, rejection: RejectionConfig
) -> Bool[Tensor, "B T"]:
    match rejection:
        case RatioMask(level=level, low=low, high=high):
            ratios = ratios_at(level, distances.proximal, samples)
            return (ratios >= low) & (ratios <= high)
        case WorstTokenMask(low=low, high=high):
            clamped = distances.proximal.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
            highest, lowest = samples.largest(clamped).exp(), (-samples.largest(-clamped)).exp()
            return (lowest >= low) & (highest <= high)
        case OffPolicyMask(bound=bound):
            away = samples.means(-distances.current)
            return ~((distances.advantages < 0.0) & (away > bound))
        case StalenessMask(max_lag=max_lag):
            return torch.as_tensor(distances.lags <= max_lag)
