"""Weights that correct for samples drawn by another policy than the one that trains.

With μ the behaviour policy and ρ = π_old/μ per token, a correction multiplies a token's loss. It
never carries gradient and never changes the denominator of the step: a token that it masks counts
as one whose loss is 0.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from cosmos_algos.errors import AlgorithmConfigError

LOG_RATIO_LIMIT = 20.0


@dataclass(frozen=True, kw_only=True, slots=True)
class NoCorrection:
    """Every weight is 1."""

    kind: Literal["none"] = "none"


@dataclass(frozen=True, kw_only=True, slots=True)
class TisConfig:
    """Truncated importance sampling: min(max(ρ, floor), cap).

    Attributes:
        cap: largest weight, commonly 2 to 5.
        floor: smallest weight.
    """

    kind: Literal["tis"] = "tis"
    cap: float = 2.0
    floor: float = 0.0

    def __post_init__(self) -> None:
        """Refuse an interval that leaves out ρ = 1."""
        _check_interval("tis", self.floor, self.cap)


@dataclass(frozen=True, kw_only=True, slots=True)
class IcePopConfig:
    """Masked importance sampling: ρ where low <= ρ <= high, else 0.

    Attributes:
        low: smallest ratio kept.
        high: largest ratio kept.
    """

    kind: Literal["icepop"] = "icepop"
    low: float = 0.5
    high: float = 5.0

    def __post_init__(self) -> None:
        """Refuse an interval that leaves out ρ = 1."""
        _check_interval("icepop", self.low, self.high)


CorrectionConfig = NoCorrection | TisConfig | IcePopConfig


def correction_weights(
    log_ratios: Float[Tensor, "B T"], config: CorrectionConfig
) -> Float[Tensor, "B T"]:
    """Return the weight of each token from log ρ = log π_old - log μ; detached.

    A ratio is clamped to e^±20 first, so that a broken log-probability cannot make an infinity.
    """
    ratios = log_ratios.detach().clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    match config:
        case NoCorrection():
            return torch.ones_like(ratios)
        case TisConfig(cap=cap, floor=floor):
            return ratios.clamp(floor, cap)
        case IcePopConfig(low=low, high=high):
            return ratios * ((ratios >= low) & (ratios <= high))


def _check_interval(kind: str, low: float, high: float) -> None:
    if not 0.0 <= low <= 1.0 <= high:
        raise AlgorithmConfigError(f"correction {kind}: [{low}, {high}] must contain 1")
