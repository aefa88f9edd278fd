"""Distillation on given answers: a frozen teacher beside the student, over the same batches."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from cosmos_algos import DistillationConfig, LossSum, TopK
from cosmos_app.given.supervised import SftTask, token_figures
from cosmos_parallel import (
    Learner,
    LossResult,
    Scorer,
    Scores,
    SftBatch,
    StepReport,
    answer_logits,
    batch_sizes,
)

_CHUNK_TOKENS = 512


@dataclass(frozen=True, kw_only=True, slots=True)
class TaughtBatch:
    """Supervised examples, and what a teacher finds in place of their answers' N tokens.

    Attributes:
        examples: what both models read.
        goals: ``logits`` [N, V], or ``logprobs`` and ``token_ids`` [N, K] of the likeliest tokens;
            empty before the teacher has scored.
    """

    examples: SftBatch
    goals: Scores = field(default_factory=dict[str, Tensor])

    @property
    def names(self) -> tuple[str, ...]:
        """Of the examples, for messages."""
        return self.examples.names

    def parts(self, num_tokens: int) -> Iterator[Tensor | TopK]:
        """Return what the teacher said, so many tokens at a time."""
        if "logits" in self.goals:
            return iter(self.goals["logits"].split(num_tokens))
        few = (self.goals["logprobs"].split(num_tokens), self.goals["token_ids"].split(num_tokens))
        return (TopK(*part) for part in zip(*few, strict=True))


class DistillationTask:
    """A teacher's distributions over given answers; see ``Task``."""

    def __init__(
        self, examples: SftTask, teacher: nn.Module, algorithm: DistillationConfig
    ) -> None:
        """Put a teacher beside supervised examples.

        Args:
            examples: where batches come from.
            teacher: frozen; of the same mesh as the student.
            algorithm: which divergence.
        """
        self._examples = examples
        self._algorithm = algorithm
        self.data = examples.data
        self.filler = TaughtBatch(examples=examples.filler)
        # whole distributions are as large as logits are
        most_kept = None if algorithm.top_k else 1
        self.scorers = (
            Scorer(model=teacher, score=self._score, join=_joined, most_kept=most_kept),
        )

    def prepare(self, learner: Learner, step: int) -> None:
        """Need nothing."""

    def prepare_held_out(self, learner: Learner) -> None:
        """Need nothing."""

    def batches(self, step: int, *, rank: int, size: int) -> Sequence[TaughtBatch]:
        """Return share ``rank`` of ``size`` of a step."""
        given = self._examples.batches(step, rank=rank, size=size)
        return [TaughtBatch(examples=batch) for batch in given]

    def held_out(self, *, rank: int, size: int) -> dict[str, list[TaughtBatch]]:
        """Return a share of the examples kept back, by data set; empty if there are none."""
        given = self._examples.held_out(rank=rank, size=size)
        return {
            name: [TaughtBatch(examples=batch) for batch in batches]
            for name, batches in given.items()
        }

    def loss(self, model: nn.Module, batch: TaughtBatch) -> LossResult:
        """Run the student over a batch that has the teacher's goals; sum over the trained tokens.

        What the divergence needs beside the logits is made chunk by chunk, and again in backward.
        """
        mine = answer_logits(model, batch.examples)
        total = mine.logits.new_zeros((), dtype=torch.float32)
        num_agreed = torch.zeros((), device=total.device)
        chunks = (part.split(_CHUNK_TOKENS) for part in (mine.logits, mine.targets, mine.mask))
        for logits, targets, mask, goal in zip(*chunks, batch.parts(_CHUNK_TOKENS), strict=True):
            part = checkpoint(self._chunk_total, goal, logits, targets, mask, use_reentrant=False)
            assert isinstance(part, Tensor)
            total = total + part
            num_agreed += ((logits.detach().argmax(-1) == _likeliest(goal)) & mask).sum()
        sizes = batch_sizes(batch.examples, total.device)
        return LossSum(
            total=total,
            weight=mine.mask.sum().double(),
            metrics={"num_agreed": num_agreed} | {n: size.double() for n, size in sizes.items()},
        )

    def figures(self, report: StepReport) -> Mapping[str, float]:
        """Return tokens, speed, and how often both find the same token likeliest."""
        agreement, left_out = report.mean("num_agreed"), self._examples.num_left_out
        return {**token_figures(report), "agreement": agreement, "left_out": left_out}

    def _score(self, teacher: nn.Module, batch: TaughtBatch) -> Scores:
        logits = answer_logits(teacher, batch.examples).logits
        parts = [self._algorithm.likeliest(part) for part in logits.split(_CHUNK_TOKENS)]
        few = [part for part in parts if part is not None]
        if not few:
            return {"logits": logits}
        logprobs, token_ids = zip(*few, strict=True)
        return {"logprobs": torch.cat(logprobs), "token_ids": torch.cat(token_ids)}

    def _chunk_total(
        self, goal: Tensor | TopK, logits: Tensor, targets: Tensor, mask: Tensor
    ) -> Tensor:
        losses = self._algorithm.token_losses(goal, logits, targets)
        return torch.where(mask, losses, 0.0).sum()


def _joined(batch: TaughtBatch, scores: Scores) -> TaughtBatch:
    return replace(batch, goals=scores)


def _likeliest(goal: Tensor | TopK) -> Tensor:
    """Return the token that a teacher finds likeliest."""
    return goal.token_ids[:, 0] if isinstance(goal, TopK) else goal.argmax(-1)
