"""Whole samples under a model: how far it is from a reference on each, and sums over their losses.

DPO and KTO judge a sample by its log-ratio to a frozen reference, a reward model by one number.
"""

from collections.abc import Mapping
from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor, nn

from cosmos_algos.batch import TokenBatch
from cosmos_algos.loss_sum import LossSum
from cosmos_algos.scoring import model_scores


@torch.no_grad()
def with_reference_scores(reference: nn.Module, batch: TokenBatch, *, chunk: int) -> TokenBatch:
    """Return the batch with a reference policy's log-probabilities.

    Args:
        reference: frozen; see ``model_scores``.
        batch: the samples.
        chunk: targets projected onto the vocabulary at a time; 0 for whole logits.
    """
    return replace(batch, reference_logprobs=model_scores(reference, batch, chunk=chunk).logprobs)


def log_ratios(
    model: nn.Module, batch: TokenBatch, needed_by: str, *, chunk: int
) -> Float[Tensor, " B"]:
    """Return Σ_t log π(y_t) - log π_ref(y_t) of each sample, over its trainable tokens.

    Args:
        model: the policy; see ``model_scores``.
        batch: of ``with_reference_scores``.
        needed_by: who asks, for the error.
        chunk: targets projected onto the vocabulary at a time; 0 for whole logits.

    Raises:
        MissingScoresError: if the batch has no reference log-probabilities.
    """
    reference = batch.scores_of("reference_logprobs", needed_by)
    logprobs = model_scores(model, batch, chunk=chunk).logprobs
    return (logprobs - reference).where(batch.trainable, 0.0).sum(-1)


def sample_sum(
    losses: Float[Tensor, " B"], batch: TokenBatch, told: Mapping[str, Float[Tensor, " B"]]
) -> LossSum:
    """Return the sum over a batch's samples, each weighed by its denominator.

    Args:
        losses: of each sample.
        batch: the samples.
        told: further numbers of each sample, of which sums are reported beside their ``samples``.
    """
    counts = batch.denominators.to(losses.dtype)
    sums = {name: (numbers.detach() * counts).sum() for name, numbers in told.items()}
    return LossSum(
        total=(losses * counts).sum(),
        weight=batch.denominators.sum(),
        metrics={"samples": counts.sum(), **sums},
    )


def pair_sum(
    losses: Float[Tensor, " P"],
    pairs: tuple[Float[Tensor, " P"], Float[Tensor, " P"]],
    batch: TokenBatch,
) -> LossSum:
    """Return the sum over a batch's pairs, of which the first row's denominator is the weight.

    Args:
        losses: of each pair.
        pairs: what was compared: the numbers of chosen and of rejected samples; see ``paired``.
        batch: of ``collate_pairs``.
    """
    chosen, rejected = (numbers.detach() for numbers in pairs)
    counts = batch.denominators[0::2].to(losses.dtype)
    return LossSum(
        total=(losses * counts).sum(),
        weight=batch.denominators.sum(),
        metrics={
            "pairs": counts.sum(),
            "accuracy": ((chosen > rejected) * counts).sum(),
            "margin": ((chosen - rejected) * counts).sum(),
            "chosen": (chosen * counts).sum(),
            "rejected": (rejected * counts).sum(),
        },
    )
