"""Supervised fine-tuning: the negative log-likelihood of given tokens."""

from dataclasses import dataclass
from typing import Literal

from torch import nn

from cosmos_algos.aggregation import AggregationConfig
from cosmos_algos.arguments import check_counts
from cosmos_algos.batch import TokenBatch
from cosmos_algos.logprobs import DEFAULT_CHUNK
from cosmos_algos.loss_sum import LossSum
from cosmos_algos.scoring import model_scores


@dataclass(frozen=True, kw_only=True, slots=True)
class SftConfig:
    """-Σ log π(y_t | y_<t) over trainable tokens.

    Attributes:
        aggregation: which mean over tokens.
        logprob_chunk: targets projected onto the vocabulary at a time; 0 for whole logits.
    """

    kind: Literal["sft"] = "sft"
    aggregation: AggregationConfig = AggregationConfig()
    logprob_chunk: int = DEFAULT_CHUNK

    def __post_init__(self) -> None:
        """Refuse a negative number of targets."""
        check_counts("sft", {"logprob_chunk": self.logprob_chunk})

    def loss(self, model: nn.Module, batch: TokenBatch) -> LossSum:
        """Run the model once over a batch and return the batch's part of the step's loss."""
        scores = model_scores(model, batch, chunk=self.logprob_chunk)
        kept = batch.trainable
        return LossSum(
            total=-(scores.logprobs * batch.token_weights).sum(),
            weight=batch.denominators.sum(),
            metrics={
                "tokens": kept.sum().to(scores.logprobs.dtype),
                "nll": -(scores.logprobs.detach() * kept).sum(),
                "entropy": (scores.entropies.detach() * kept).sum(),
            },
        )
