"""KTO: a policy from single samples marked good or bad.

Ethayarajh et al., arXiv 2402.01306, eq. 8.
"""

from dataclasses import dataclass
from typing import Literal

from jaxtyping import Float
from torch import Tensor, nn

from cosmos_algos.arguments import check_coefficients, check_counts, check_scales
from cosmos_algos.batch import TokenBatch
from cosmos_algos.errors import AlgorithmConfigError
from cosmos_algos.labelled import KtoBatch
from cosmos_algos.logprobs import DEFAULT_CHUNK
from cosmos_algos.loss_sum import LossSum
from cosmos_algos.preferences import kto_losses
from cosmos_algos.whole_samples import log_ratios, sample_sum, with_reference_scores


@dataclass(frozen=True, kw_only=True, slots=True)
class KtoConfig:
    """KTO with a reference.

    Attributes:
        beta: aversion to risk.
        desirable_weight: λ_D.
        undesirable_weight: λ_U; the ratio of the two makes up for unequal numbers.
        logprob_chunk: targets projected onto the vocabulary at a time; 0 for whole logits.
    """

    kind: Literal["kto"] = "kto"
    beta: float = 0.1
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0
    logprob_chunk: int = DEFAULT_CHUNK

    def __post_init__(self) -> None:
        """Refuse what is no scale, or no weight."""
        check_scales("kto", {"beta": self.beta})
        check_counts("kto", {"logprob_chunk": self.logprob_chunk})
        weights = {
            "desirable_weight": self.desirable_weight,
            "undesirable_weight": self.undesirable_weight,
        }
        check_coefficients("kto", weights)
        if not any(weights.values()):
            raise AlgorithmConfigError("kto: both weights are 0, so nothing would be learned")

    def with_reference(self, reference: nn.Module, batch: TokenBatch) -> TokenBatch:
        """Return samples with the reference policy's log-probabilities."""
        return with_reference_scores(reference, batch, chunk=self.logprob_chunk)

    def log_ratios(self, model: nn.Module, batch: TokenBatch) -> Float[Tensor, " B"]:
        """Return Σ_t log π - log π_ref of each sample.

        Of prompts with answers to *other* prompts, and without gradient, their sum and number
        over the step make the baseline.
        """
        return log_ratios(model, batch, "kto", chunk=self.logprob_chunk)

    def loss(self, model: nn.Module, batch: KtoBatch) -> LossSum:
        """Run the model once over a batch and return the batch's part of the step's loss.

        Raises:
            MissingScoresError: if the batch has no reference log-probabilities.
        """
        ratios = self.log_ratios(model, batch.tokens)
        weights = (self.desirable_weight, self.undesirable_weight)
        losses = kto_losses(
            ratios, batch.desirable, batch.baseline, beta=self.beta, weights=weights
        )
        return sample_sum(losses, batch.tokens, {"log_ratio": ratios})
