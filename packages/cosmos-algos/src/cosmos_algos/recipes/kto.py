"""KTO: a policy from single samples marked good or bad.

Ethayarajh et al., arXiv 2402.01306, eq. 8.
"""

from dataclasses import dataclass, replace
from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from cosmos_algos.arguments import check_coefficients
from cosmos_algos.batch import TokenBatch
from cosmos_algos.errors import AlgorithmConfigError
from cosmos_algos.logprobs import DEFAULT_CHUNK
from cosmos_algos.loss_sum import LossSum
from cosmos_algos.preferences import kto_losses
from cosmos_algos.scoring import model_scores


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class KtoBatch:
    """Samples with marks.

    Attributes:
        tokens: the samples, with the reference's log-probabilities.
        desirable: which are good.
        baseline: z of the whole step; see ``KtoConfig.log_ratios`` and ``kto_baseline``.
    """

    tokens: TokenBatch
    desirable: Bool[Tensor, " B"]
    baseline: Float[Tensor, ""]

    @property
    def names(self) -> tuple[str, ...]:
        """Of the samples, for messages."""
        return self.tokens.names

    def to(self, device: torch.device | str) -> "KtoBatch":
        """Return the batch with every tensor on ``device``."""
        return replace(
            self,
            tokens=self.tokens.to(device),
            desirable=self.desirable.to(device),
            baseline=self.baseline.to(device),
        )


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
        weights = {
            "desirable_weight": self.desirable_weight,
            "undesirable_weight": self.undesirable_weight,
        }
        numbers = {"beta": self.beta, "logprob_chunk": self.logprob_chunk, **weights}
        check_coefficients("kto", numbers)
        if self.beta == 0.0:
            raise AlgorithmConfigError(f"kto: beta {self.beta} must be above 0")
        if not any(weights.values()):
            raise AlgorithmConfigError("kto: both weights are 0, so nothing would be learned")

    def log_ratios(self, model: nn.Module, batch: TokenBatch) -> Float[Tensor, " B"]:
        """Return Σ_t log π - log π_ref of each sample.

        Of prompts with answers to *other* prompts, and without gradient, their sum and number
        over the step make the baseline.
        """
        reference = batch.scores_of("reference_logprobs", "kto")
        logprobs = model_scores(model, batch, chunk=self.logprob_chunk).logprobs
        return (logprobs - reference).where(batch.trainable, 0.0).sum(-1)

    def loss(self, model: nn.Module, batch: KtoBatch) -> LossSum:
        """Run the model once over a batch and return the batch's part of the step's loss.

        Raises:
            MissingScoresError: if the batch has no reference log-probabilities.
        """
        ratios = self.log_ratios(model, batch.tokens)
        losses = kto_losses(
            ratios,
            batch.desirable,
            batch.baseline.to(ratios.dtype),
            beta=self.beta,
            weights=(self.desirable_weight, self.undesirable_weight),
        )
        counts = batch.tokens.denominators.to(losses.dtype)
        return LossSum(
            total=(losses * counts).sum(),
            weight=batch.tokens.denominators.sum(),
            metrics={"samples": counts.sum(), "log_ratio": (ratios.detach() * counts).sum()},
        )
