"""What an output head is asked for each trainable target: scores, and other tokens'.

Each can be made of hidden states, a chunk at a time, or of logits that already exist.
"""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from cosmos_algos.batch import TokenBatch
from cosmos_algos.distillation import TopK, candidate_logprobs, known_logprobs, top_k
from cosmos_algos.logprobs import chunked_logprobs, scores_from_logits
from cosmos_algos.output_head import OutputHead, accurate


@runtime_checkable
class Asked(Protocol):
    """C numbers for each trainable target of a batch."""

    def of_hidden(self, hidden: Float[Tensor, "N H"], head: OutputHead) -> Float[Tensor, "N C"]:
        """Make them from hidden states, chunk by chunk."""
        ...

    def of_logits(self, logits: Float[Tensor, "N V"]) -> Float[Tensor, "N C"]:
        """Make them from logits that already exist."""
        ...


class TargetScores:
    """Log-probability and entropy of each target."""

    def __init__(self, batch: TokenBatch, temperature: float, chunk: int) -> None:
        self._targets = batch.targets[batch.trainable]
        self._temperature = temperature
        self._chunk = chunk

    def of_hidden(self, hidden: Float[Tensor, "N H"], head: OutputHead) -> Float[Tensor, "N C"]:
        """Score them by ``chunked_logprobs``."""
        chosen = chunked_logprobs(
            hidden, head, self._targets, temperature=self._temperature, chunk=self._chunk
        )
        return torch.stack(chosen, dim=-1)

    def of_logits(self, logits: Float[Tensor, "N V"]) -> Float[Tensor, "N C"]:
        """Score them by plain log-softmax."""
        chosen = scores_from_logits(logits, self._targets, temperature=self._temperature)
        return torch.stack(chosen, dim=-1)


class CandidateScores:
    """The same, and log-probabilities of K other tokens."""

    def __init__(
        self, batch: TokenBatch, temperature: float, chunk: int, token_ids: Int[Tensor, "N K"]
    ) -> None:
        self._inner = TargetScores(batch, temperature, chunk)
        self._token_ids = token_ids
        self._temperature = temperature
        self._chunk = chunk

    def of_hidden(self, hidden: Float[Tensor, "N H"], head: OutputHead) -> Float[Tensor, "N C"]:
        """Project once for the targets and once for the others."""
        others = candidate_logprobs(
            hidden, head, self._token_ids, temperature=self._temperature, chunk=self._chunk
        )
        return torch.cat([self._inner.of_hidden(hidden, head), others], dim=-1)

    def of_logits(self, logits: Float[Tensor, "N V"]) -> Float[Tensor, "N C"]:
        """Gather the others from the same log-softmax."""
        logprobs = torch.log_softmax(accurate(logits) / self._temperature, dim=-1)
        others = known_logprobs(logprobs, self._token_ids)
        return torch.cat([self._inner.of_logits(logits), others], dim=-1)


class LikeliestScores:
    """The same, and log-probabilities of the K likeliest tokens, which ``token_ids`` then names."""

    def __init__(self, batch: TokenBatch, temperature: float, chunk: int, k: int) -> None:
        self.token_ids = batch.targets.new_zeros(0, k)
        self._inner = TargetScores(batch, temperature, chunk)
        self._temperature = temperature
        self._chunk = chunk
        self._k = k

    def of_hidden(self, hidden: Float[Tensor, "N H"], head: OutputHead) -> Float[Tensor, "N C"]:
        """Project chunk by chunk; the largest logits are the largest probabilities."""
        parts = [
            top_k(head.logits(rows), self._k, temperature=self._temperature)
            for rows in hidden.split(self._chunk)
        ]
        return self._joined(self._inner.of_hidden(hidden, head), parts)

    def of_logits(self, logits: Float[Tensor, "N V"]) -> Float[Tensor, "N C"]:
        """Take them from the logits."""
        part = top_k(accurate(logits), self._k, temperature=self._temperature)
        return self._joined(self._inner.of_logits(logits), [part])

    def _joined(self, scores: Tensor, parts: Sequence[TopK]) -> Tensor:
        self.token_ids = torch.cat([part.token_ids for part in parts])
        return torch.cat([scores, torch.cat([part.logprobs for part in parts])], dim=-1)
