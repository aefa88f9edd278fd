"""The policy-gradient objective that GRPO and its descendants share.

An algorithm is a choice of things that are independent of each other: what the ratio is anchored
on, the policy loss, the correction, what is left out, and the penalties. Here they meet, once.
"""

from dataclasses import dataclass, field
from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from cosmos_algos.arguments import check_choice, check_coefficients
from cosmos_algos.batch import TokenBatch
from cosmos_algos.corrections import (
    LOG_RATIO_LIMIT,
    CorrectionConfig,
    NoCorrection,
    TisConfig,
    correction_weights,
)
from cosmos_algos.divergence import KlConfig, kl_loss, kl_reward, kl_values, pathwise_kl
from cosmos_algos.errors import AlgorithmConfigError
from cosmos_algos.logprobs import TokenScores
from cosmos_algos.loss_sum import LossSum
from cosmos_algos.mismatch import mismatch_sums
from cosmos_algos.rejection import Distances, RejectionConfig, kept_tokens
from cosmos_algos.surrogate import AipoClip, ClipConfig, SurrogateConfig, policy_surrogate

Anchor = Literal["old", "behaviour", "interpolated"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ObjectiveConfig:
    """What a token's loss is made of.

    Attributes:
        surrogate: the policy loss.
        anchor: what the ratio is over. ``old``: the policy at the start of the step (the batch's
            ``old_logprobs``, else the current ones, so r = 1 with a gradient), with ``correction``
            answering for π_old/μ. ``interpolated``: the same, π_old guessed from each token's lag
            in place of a forward pass. ``behaviour``: μ itself; then r holds the whole importance
            weight, and a correction on top would count it twice, so none is allowed.
        correction: for samples of a policy other than the anchor.
        rejections: what is left out, on top.
        kl: penalty towards a reference.
        teacher_coefficient: weight of log π_teacher - log π in the advantage of each token
            (on-policy distillation); 0 for none.
        entropy_coefficient: bonus on the entropy of each distribution; 0 for none.
    """

    surrogate: SurrogateConfig = field(default_factory=ClipConfig)
    anchor: Anchor = "old"
    correction: CorrectionConfig = field(default_factory=TisConfig)
    rejections: tuple[RejectionConfig, ...] = ()
    kl: KlConfig = field(default_factory=KlConfig)
    teacher_coefficient: float = 0.0
    entropy_coefficient: float = 0.0

    def __post_init__(self) -> None:
        """Refuse to count an importance weight twice, or AIPO over anything but μ."""
        check_choice("objective: anchor", self.anchor, Anchor)
        sizes = {
            "teacher_coefficient": abs(self.teacher_coefficient),
            "entropy_coefficient": abs(self.entropy_coefficient),
        }
        check_coefficients("objective", sizes)
        if self.anchor == "behaviour" and not isinstance(self.correction, NoCorrection):
            raise AlgorithmConfigError(
                f"objective: anchor 'behaviour' already weighs by π/μ; correction "
                f"{self.correction.kind!r} would count it twice: use correction.kind = 'none'"
            )
        if isinstance(self.surrogate, AipoClip) and self.anchor != "behaviour":
            raise AlgorithmConfigError(
                f"objective: aipo bounds π/μ, so its anchor is 'behaviour', not {self.anchor!r}"
            )

    @property
    def corrects(self) -> bool:
        """Whether samples of older weights are weighed, by a correction or by the ratio itself."""
        return self.anchor == "behaviour" or not isinstance(self.correction, NoCorrection)


def proximal_logprobs(
    logprobs: Float[Tensor, "B T"], batch: TokenBatch, anchor: Anchor
) -> Float[Tensor, "B T"]:
    """Return log π_old of each target, without gradient.

    ``interpolated`` is A-3PO's guess (arXiv 2512.06547): at d versions of lag the policy of the
    last version lies (d - 1)/d of the way from μ to the current one, in log-probability, and
    without lag it is the current one.

    Raises:
        ShapeError: if there is not one log-probability for each token of the batch.
    """
    batch.samples.check("proximal log-probs", {"logprobs": logprobs})
    current = logprobs.detach()
    if anchor == "interpolated":
        lags = batch.lags.to(current.dtype)
        share = torch.where(lags > 0, 1.0 - 1.0 / lags.clamp(min=1.0), 1.0)
        return batch.behaviour_logprobs + share * (current - batch.behaviour_logprobs)
    return current if batch.old_logprobs is None else batch.old_logprobs


def policy_objective(
    scores: TokenScores,
    batch: TokenBatch,
    objective: ObjectiveConfig,
    beside: Float[Tensor, "B T"] | None = None,
) -> LossSum:
    """Return the loss of a batch, as a sum over its tokens weighed by the batch's own weights.

    Σ_t w_t (c_t l_t + β kl_t - η H_t) - Σ_t v_t log π_t, with w the batch's weights, l the policy
    loss over r = π/π_old, c the correction where nothing rejects the token, kl the penalty, H the
    entropy and v the weights of imitation. With c_t = π_old/μ and PPO's clip this is AReaL's
    decoupled objective (arXiv 2505.24298, eq. 5).

    What stands where nothing is trained, padding on either side for one, does not matter: it may
    be NaN.

    Args:
        scores: log π (with gradient) and entropies of the batch's targets.
        batch: what was sampled, by whom, and what it earned.
        objective: the choices.
        beside: a further loss of each token, corrected and left out with the surrogate.

    Raises:
        MissingScoresError: if a penalty needs log-probabilities that the batch has not.
        ShapeError: if there is not one score, or further loss, for each token of the batch.
    """
    given = {**scores._asdict(), **({} if beside is None else {"beside": beside})}
    batch.samples.check("policy loss", given)
    kept = batch.trainable
    scores = TokenScores(scores.logprobs.where(kept, 0.0), scores.entropies.where(kept, 0.0))
    beside = None if beside is None else beside.where(kept, 0.0)
    batch = batch.only_trained()
    logprobs, behaviour = scores.logprobs, batch.behaviour_logprobs
    proximal = proximal_logprobs(logprobs, batch, objective.anchor)
    anchor = behaviour if objective.anchor == "behaviour" else proximal
    advantages = _shaped_advantages(logprobs.detach(), batch, objective)
    distances = Distances(
        proximal - behaviour, logprobs.detach() - behaviour, advantages, batch.lags
    )
    weights = correction_weights(anchor - behaviour, objective.correction, batch.samples)
    weights = weights * kept_tokens(distances, batch.samples, objective.rejections)
    surrogate, clipped = policy_surrogate(
        logprobs, anchor, advantages, batch.samples, objective.surrogate
    )
    losses = weights * (surrogate if beside is None else surrogate + beside)
    divergence = torch.zeros_like(losses)
    if objective.kl.coefficient:
        ratios = (logprobs - anchor).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
        penalty, divergence = _divergence(logprobs, batch, weights * ratios, objective.kl)
        losses = losses + objective.kl.coefficient * penalty
    if objective.entropy_coefficient:
        losses = losses - objective.entropy_coefficient * scores.entropies
    total = (losses * batch.token_weights).sum()
    if batch.imitation_weights is not None:
        total = total - (logprobs * batch.imitation_weights).sum()
    return LossSum(
        total=total,
        weight=batch.denominators.sum(),
        metrics=_metrics(scores, batch, clipped, weights, divergence),
    )


def _shaped_advantages(
    logprobs: Float[Tensor, "B T"], batch: TokenBatch, objective: ObjectiveConfig
) -> Float[Tensor, "B T"]:
    """Return advantages with what a reference or a teacher adds to them."""
    advantages = batch.advantages
    if objective.kl.coefficient and objective.kl.place == "reward":
        reference = batch.scores_of("reference_logprobs", "kl.coefficient over 0")
        advantages = advantages + kl_reward(logprobs, reference, batch.samples, objective.kl)
    if objective.teacher_coefficient:
        teacher = batch.scores_of("teacher_logprobs", "teacher_coefficient other than 0")
        gap = (teacher - logprobs).where(batch.trainable, 0.0)
        advantages = advantages + objective.teacher_coefficient * gap
    return advantages


def _divergence(
    logprobs: Float[Tensor, "B T"],
    batch: TokenBatch,
    importance: Float[Tensor, "B T"],
    kl: KlConfig,
) -> tuple[Float[Tensor, "B T"], Float[Tensor, "B T"]]:
    """Return what a penalty adds to the losses, and the divergence itself, wherever it counts."""
    reference = batch.scores_of("reference_logprobs", "kl.coefficient over 0")
    divergence = importance.detach() * kl_values(logprobs.detach(), reference, kl.estimator)
    if kl.place == "loss":
        return kl_loss(logprobs, reference, importance, kl), divergence
    return importance.detach() * pathwise_kl(logprobs, reference, kl), divergence


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
        "rejected": weights == 0.0,
        "kl": divergence,
        "advantage_abs": batch.advantages.abs(),
    }
    dtype = scores.logprobs.dtype
    totals = {name: (values * kept).sum().to(dtype) for name, values in sums.items()}
    return totals | mismatch_sums(log_ratios, kept, batch.lags)
