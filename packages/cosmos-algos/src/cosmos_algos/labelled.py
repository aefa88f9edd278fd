"""Batches of given samples, which no policy of ours has drawn: for SFT and for preferences."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from cosmos_algos.aggregation import SampleWeights, check_entries
from cosmos_algos.batch import TokenBatch, check_token_ids, lay_out, next_column
from cosmos_algos.errors import PairingError, TrajectoryError


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LabelledTokens:
    """A sample and which of its tokens are to be learned.

    Attributes:
        token_ids: int32[T].
        trainable: bool[T]; the first is false, as nothing predicts it.
        name: of the sample, for messages.
        images: references of the pictures among the tokens, in order.
    """

    token_ids: npt.NDArray[np.int32]
    trainable: npt.NDArray[np.bool_]
    name: str = "sample"
    images: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Refuse arrays that do not fit together.

        Raises:
            TrajectoryError: names the sample.
        """
        if self.token_ids.shape != self.trainable.shape or self.token_ids.ndim != 1:
            raise TrajectoryError(
                f"{self.name}: {self.token_ids.shape} token ids and {self.trainable.shape} marks"
            )
        if len(self.trainable) and self.trainable[0]:
            raise TrajectoryError(f"{self.name}: token 0 is trainable, but no token predicts it")

    @property
    def num_trainable(self) -> int:
        """How many tokens are learned."""
        return int(np.count_nonzero(self.trainable))


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


def collate_labelled(
    samples: Sequence[LabelledTokens],
    weights: SampleWeights,
    *,
    pad_id: int = 0,
    vocab_size: int = 0,
) -> TokenBatch:
    """Lay given samples out as one batch, with behaviour log-probabilities and advantages of 0.

    Args:
        samples: one row each.
        weights: the entries of these samples in the weights of the whole step.
        pad_id: token id of the padding.
        vocab_size: token ids have to be below it; 0 where it is not known.

    Raises:
        TokenIdError: if a token id is negative or beyond the vocabulary.
        ShapeError: if the weights are not of these samples.
    """
    check_entries(weights, len(samples))
    for sample in samples:
        check_token_ids(sample.token_ids, vocab_size, sample.name)
    width = max([1, *(len(sample.token_ids) for sample in samples)])
    token_ids = lay_out([sample.token_ids for sample in samples], width, pad_id).long()
    valid = lay_out([np.ones(len(s.token_ids), np.bool_) for s in samples], width, False)
    trainable = next_column(lay_out([sample.trainable for sample in samples], width, False))
    zeros = torch.zeros(token_ids.shape)
    return TokenBatch(
        token_ids=token_ids,
        valid=valid,
        targets=next_column(token_ids),
        trainable=trainable,
        behaviour_logprobs=zeros,
        advantages=zeros,
        token_weights=weights.token.float()[:, None] * trainable,
        denominators=weights.denominator.double(),
        lags=torch.zeros_like(token_ids),
        names=tuple(sample.name for sample in samples),
    )


def collate_pairs(
    pairs: Sequence[tuple[LabelledTokens, LabelledTokens]],
    *,
    pad_id: int = 0,
    vocab_size: int = 0,
) -> TokenBatch:
    """Lay (chosen, rejected) pairs out in rows 2p and 2p + 1; a pair counts 1.

    Raises:
        PairingError: if a sample of a pair has nothing to be judged by; names it.
        TokenIdError: if a token id is negative or beyond the vocabulary.
    """
    rows = [sample for pair in pairs for sample in pair]
    for index, sample in enumerate(rows):
        if not sample.num_trainable:
            raise PairingError(f"pair {index // 2}: {sample.name} has no trainable token")
    ones = torch.ones(len(rows), dtype=torch.float64)
    counts = torch.tensor([1.0, 0.0], dtype=torch.float64).repeat(len(pairs))
    return collate_labelled(rows, SampleWeights(ones, counts), pad_id=pad_id, vocab_size=vocab_size)


def paired(values: Float[Tensor, " B"]) -> tuple[Float[Tensor, " P"], Float[Tensor, " P"]]:
    """Return the values of chosen and of rejected rows.

    Raises:
        PairingError: if the number of rows is odd.
    """
    if values.shape[0] % 2:
        raise PairingError(f"{values.shape[0]} rows do not form pairs of chosen and rejected")
    return values[0::2], values[1::2]
