"""The clipped policy-gradient objective that GRPO and its descendants share.

A recipe is a choice of four things that are independent of each other: the ratio's anchor, the
clip range, the correction, and the penalties. Here they meet, once.
"""

from dataclasses import dataclass, field
from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from cosmos_algos.batch import TokenBatch
from cosmos_algos.corrections import (
    LOG_RATIO_LIMIT,
    CorrectionConfig,
    NoCorrection,
    TisConfig,
    correction_weights,
)
from cosmos_algos.divergence import KlConfig, kl_loss
from cosmos_algos.errors import AlgorithmConfigError
from cosmos_algos.logprobs import TokenScores
from cosmos_algos.loss_sum import LossSum
from cosmos_algos.mismatch import mismatch_sums


@dataclass(frozen=True, kw_only=True, slots=True)
class ClipConfig:
    """Where the ratio r = π/anchor stops to matter.

    Attributes:
        low: r is clipped below at 1 - low.
        high: and above at 1 + high; larger than ``low`` is DAPO's clip-higher.
        dual: c > 1 of the dual clip, which bounds the loss of a negative advantage at -cA;
            0 leaves it unbounded.
    """

    low: float = 0.2
    high: float = 0.2
    dual: float = 0.0

    def __post_init__(self) -> None:
        """Refuse ranges that do not contain 1."""
        if not 0.0 <= self.low <= 1.0 or self.high < 0.0:
            raise AlgorithmConfigError(
                f"clip: low {self.low} must be in [0, 1] and high {self.high} at least 0"
            )
        if self.dual and self.dual <= 1.0:
            raise AlgorithmConfigError(f"clip: dual {self.dual} must be over 1, or 0 for none")


@dataclass(frozen=True, kw_only=True, slots=True)
class ObjectiveConfig:
    """What a token's loss is made of.

    Attributes:
        clip: the clip range.
        anchor: what the ratio is over. ``old``: the policy at the start of the step (the batch's
            ``old_logprobs``, else the current ones, so r = 1 with a gradient), with ``correction``
            answering for π_old/μ. ``behaviour``: μ itself; then r holds the whole importance
            weight, and a correction on top would count it twice, so none is allowed.
        correction: for samples of a policy other than the anchor.
        kl: penalty towards a reference.
        entropy_coefficient: bonus on the entropy of each distribution; 0 for none.
    """

    clip: ClipConfig = field(default_factory=ClipConfig)
    anchor: Literal["old", "behaviour"] = "old"
    correction: CorrectionConfig = field(default_factory=TisConfig)
    kl: KlConfig = field(default_factory=KlConfig)
    entropy_coefficient: float = 0.0

    def __post_init__(self) -> None:
        """Refuse to count an importance weight twice."""
        if self.anchor == "behaviour" and not isinstance(self.correction, NoCorrection):
            raise AlgorithmConfigError(
                f"objective: anchor 'behaviour' already weighs by π/μ; correction "
                f"{self.correction.kind!r} would count it twice: use correction.kind = 'none'"
            )


def clipped_surrogate(
    ratios: Float[Tensor, "B T"], advantages: Float[Tensor, "B T"], clip: ClipConfig
) -> tuple[Float[Tensor, "B T"], Bool[Tensor, "B T"]]:
    """Return per-token losses -min(rA, clip(r)A) and where clipping took the gradient away.

    PPO (arXiv 1707.06347, eq. 7), clip-higher (DAPO, arXiv 2503.14476, eq. 10), dual clip
    (arXiv 1912.09729, eq. 3).
    """
    free = -ratios * advantages
    bounded = -ratios.clamp(1.0 - clip.low, 1.0 + clip.high) * advantages
    losses = torch.maximum(free, bounded)
    clipped = bounded > free
    if clip.dual:
        ceiling = -clip.dual * advantages
        dual = (advantages < 0.0) & (losses > ceiling)
        losses = torch.where(dual, ceiling, losses)
        clipped = clipped | dual
    return losses, clipped


def policy_objective(scores: TokenScores, batch: TokenBatch, objective: ObjectiveConfig) -> LossSum:
    """Return the loss of a batch, as a sum over its tokens weighed by the batch's own weights.

    Args:
        scores: log π (with gradient) and entropies of the batch's targets.
        batch: what was sampled, by whom, and what it earned.
        objective: the four choices.

    Raises:
        AlgorithmConfigError: if a KL penalty is asked for and the batch has no reference.
    """
    logprobs = scores.logprobs
    old = batch.behaviour_logprobs
    if objective.anchor == "old":
        old = logprobs.detach() if batch.old_logprobs is None else batch.old_logprobs
    ratios = (logprobs - old).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    weights = correction_weights(old - batch.behaviour_logprobs, objective.correction)
    surrogate, clipped = clipped_surrogate(ratios, batch.advantages, objective.clip)
    losses = weights * surrogate
    divergence = torch.zeros_like(losses)
    if objective.kl.coefficient:
        if batch.reference_logprobs is None:
            raise AlgorithmConfigError(
                "kl: a coefficient over 0 needs the batch's reference_logprobs"
            )
        divergence = kl_loss(logprobs, batch.reference_logprobs, weights * ratios, objective.kl)
        losses = losses + objective.kl.coefficient * divergence
    if objective.entropy_coefficient:
        losses = losses - objective.entropy_coefficient * scores.entropies
    return LossSum(
        total=(losses * batch.token_weights).sum(),
        weight=batch.denominators.sum(),
        metrics=_metrics(scores, batch, clipped, weights, divergence),
    )


def _metrics(
    scores: TokenScores,
    batch: TokenBatch,
    clipped: Bool[Tensor, "B T"],
    weights: Float[Tensor, "B T"],
    divergence: Float[Tensor, "B T"],
) -> dict[str, Float[Tensor, ""]]:
    """Return sums over trainable tokens; the keys never depend on the data."""
    kept = batch.trainable
    log_ratios = scores.logprobs.detach() - batch.behaviour_logprobs
    sums = {
        "tokens": kept,
        "entropy": scores.entropies.detach(),
        "clipped": clipped,
        "correction": weights,
        "kl": divergence.detach(),
        "advantage_abs": batch.advantages.abs(),
    }
    dtype = scores.logprobs.dtype
    totals = {name: (values * kept).sum().to(dtype) for name, values in sums.items()}
    return totals | mismatch_sums(log_ratios, kept, batch.lags)
