"""DPO: a policy from preferences, without a reward model; or IPO, its bounded relative.

Rafailov et al., arXiv 2305.18290, eq. 7; Azar et al., arXiv 2310.12036, eq. 17.
"""

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn

from cosmos_algos.arguments import check_choice, check_coefficients
from cosmos_algos.batch import TokenBatch
from cosmos_algos.errors import AlgorithmConfigError
from cosmos_algos.labelled import paired
from cosmos_algos.logprobs import DEFAULT_CHUNK
from cosmos_algos.loss_sum import LossSum
from cosmos_algos.preferences import dpo_losses, ipo_losses
from cosmos_algos.scoring import model_scores

Form = Literal["sigmoid", "squared"]


@dataclass(frozen=True, kw_only=True, slots=True)
class DpoConfig:
    """DPO on pairs (``collate_pairs``) with the reference's log-probabilities.

    Attributes:
        form: ``sigmoid`` is DPO, ``squared`` is IPO, on mean log-ratios.
        beta: how near the policy stays to the reference.
        label_smoothing: probability that a label is wrong; for ``sigmoid``.
        logprob_chunk: targets projected onto the vocabulary at a time; 0 for whole logits.
    """

    kind: Literal["dpo"] = "dpo"
    form: Form = "sigmoid"
    beta: float = 0.1
    label_smoothing: float = 0.0
    logprob_chunk: int = DEFAULT_CHUNK

    def __post_init__(self) -> None:
        """Refuse what is no probability, or no scale, and smoothing that would do nothing."""
        check_choice("dpo: form", self.form, Form)
        check_coefficients("dpo", {"beta": self.beta, "logprob_chunk": self.logprob_chunk})
        if self.beta == 0.0 or not 0.0 <= self.label_smoothing < 0.5:
            raise AlgorithmConfigError(
                f"dpo: beta {self.beta} must be above 0 and label_smoothing "
                f"{self.label_smoothing} in [0, 0.5)"
            )
        if self.form == "squared" and self.label_smoothing:
            raise AlgorithmConfigError(
                f"dpo: label_smoothing {self.label_smoothing} is of form 'sigmoid'; 'squared' has "
                "no probabilities to smooth"
            )

    @torch.no_grad()
    def with_reference(self, reference: nn.Module, batch: TokenBatch) -> TokenBatch:
        """Return the batch with the reference policy's log-probabilities."""
        scores = model_scores(reference, batch, chunk=self.logprob_chunk)
        return replace(batch, reference_logprobs=scores.logprobs)

    def loss(self, model: nn.Module, batch: TokenBatch) -> LossSum:
        """Run the model once over a batch and return the batch's part of the step's loss.

        Raises:
            MissingScoresError: if the batch has no reference log-probabilities.
            PairingError: if its rows are no pairs.
        """
        reference = batch.scores_of("reference_logprobs", "dpo")
        logprobs = model_scores(model, batch, chunk=self.logprob_chunk).logprobs
        ratios = (logprobs - reference).where(batch.trainable, 0.0).sum(-1)
        if self.form == "squared":
            chosen, rejected = paired(ratios / batch.trainable.sum(-1).clamp(min=1))
            losses = ipo_losses(chosen, rejected, beta=self.beta)
        else:
            chosen, rejected = paired(ratios)
            losses = dpo_losses(
                chosen, rejected, beta=self.beta, label_smoothing=self.label_smoothing
            )
        counts = batch.denominators[0::2].to(losses.dtype)
        return LossSum(
            total=(losses * counts).sum(),
            weight=batch.denominators.sum(),
            metrics=_metrics(chosen.detach(), rejected.detach(), counts),
        )


def _metrics(chosen: Tensor, rejected: Tensor, counts: Tensor) -> dict[str, Tensor]:
    return {
        "pairs": counts.sum(),
        "accuracy": ((chosen > rejected) * counts).sum(),
        "margin": ((chosen - rejected) * counts).sum(),
        "chosen": (chosen * counts).sum(),
        "rejected": (rejected * counts).sum(),
    }
