"""Distillation on given answers: a frozen teacher beside the student, over the same batches."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from cosmos_algos import DistillationConfig, LossSum
from cosmos_app.given.supervised import SftTask, token_figures
from cosmos_parallel import (
    Learner,
    LossResult,
    SftBatch,
    StepReport,
    answer_logits,
    batch_sizes,
)

_CHUNK_TOKENS = 512


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
        self._teacher = teacher
        self._algorithm = algorithm
        self.num_examples = examples.num_examples
        self.filler = examples.filler

    def prepare(self, learner: Learner, step: int) -> None:
        """Need nothing."""

    def batches(self, step: int, *, rank: int, size: int) -> Sequence[SftBatch]:
        """Return share ``rank`` of ``size`` of a step."""
        return self._examples.batches(step, rank=rank, size=size)

    def held_out(self, *, rank: int, size: int) -> Sequence[SftBatch] | None:
        """Return a share of the examples kept back; ``None`` if there are none."""
        return self._examples.held_out(rank=rank, size=size)

    def loss(self, model: nn.Module, batch: SftBatch) -> LossResult:
        """Run teacher and student over a batch and sum over the trained tokens.

        What the divergence needs beside the logits is made chunk by chunk, and again in backward.
        """
        with torch.no_grad():
            goals = answer_logits(self._teacher, batch).logits
        mine = answer_logits(model, batch)
        total = mine.logits.new_zeros((), dtype=torch.float32)
        num_agreed = torch.zeros((), device=total.device)
        chunks = (mine.logits, mine.targets, mine.mask, goals)
        for logits, targets, mask, goal in zip(
            *(part.split(_CHUNK_TOKENS) for part in chunks), strict=True
        ):
            part = checkpoint(self._chunk_total, goal, logits, targets, mask, use_reentrant=False)
            assert isinstance(part, Tensor)
            total = total + part
            num_agreed += ((logits.detach().argmax(-1) == goal.argmax(-1)) & mask).sum()
        sizes = batch_sizes(batch, total.device)
        return LossSum(
            total=total,
            weight=mine.mask.sum().double(),
            metrics={"num_agreed": num_agreed} | {n: size.double() for n, size in sizes.items()},
        )

    def figures(self, report: StepReport) -> Mapping[str, float]:
        """Return tokens, speed, and how often both find the same token likeliest."""
        return {**token_figures(report), "agreement": report.mean("num_agreed")}

    def _chunk_total(self, goal: Tensor, logits: Tensor, targets: Tensor, mask: Tensor) -> Tensor:
        losses = self._algorithm.token_losses(goal, logits, targets)
        return torch.where(mask, losses, 0.0).sum()
