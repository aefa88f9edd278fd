"""DPO: a policy from preferences, without a reward model; or IPO, its bounded relative.

Rafailov et al., arXiv 2305.18290, eq. 7; Azar et al., arXiv 2310.12036, eq. 17.
"""

from dataclasses import dataclass
from typing import Literal

from torch import nn

from cosmos_algos.arguments import check_choice, check_counts, check_scales
from cosmos_algos.batch import TokenBatch
from cosmos_algos.errors import AlgorithmConfigError
from cosmos_algos.labelled import paired
from cosmos_algos.logprobs import DEFAULT_CHUNK
from cosmos_algos.loss_sum import LossSum
from cosmos_algos.preferences import check_label_smoothing, dpo_losses, ipo_losses
from cosmos_algos.whole_samples import log_ratios, pair_sum, with_reference_scores

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
        check_scales("dpo", {"beta": self.beta})
        check_counts("dpo", {"logprob_chunk": self.logprob_chunk})
        check_label_smoothing(self.label_smoothing)
        if self.form == "squared" and self.label_smoothing:
            raise AlgorithmConfigError(
                f"dpo: label_smoothing {self.label_smoothing} is of form 'sigmoid'; 'squared' has "
                "no probabilities to smooth"
            )

    def with_reference(self, reference: nn.Module, batch: TokenBatch) -> TokenBatch:
        """Return the batch with the reference policy's log-probabilities."""
        return with_reference_scores(reference, batch, chunk=self.logprob_chunk)

    def loss(self, model: nn.Module, batch: TokenBatch) -> LossSum:
        """Run the model once over a batch and return the batch's part of the step's loss.

        Raises:
            MissingScoresError: if the batch has no reference log-probabilities.
            PairingError: if its rows are no pairs.
        """
        ratios = log_ratios(model, batch, "dpo", chunk=self.logprob_chunk)
        if self.form == "squared":
            pairs = paired(ratios / batch.trainable.sum(-1).clamp(min=1))
            losses = ipo_losses(*pairs, beta=self.beta)
        else:
            pairs = paired(ratios)
            losses = dpo_losses(*pairs, beta=self.beta, label_smoothing=self.label_smoothing)
        return pair_sum(losses, pairs, batch)
