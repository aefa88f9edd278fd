"""Supervised fine-tuning: the loss, and a loop over the learner."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from cosmos_parallel.cross_entropy import summed_cross_entropy
from cosmos_parallel.learner import Evaluation, Learner, StepReport
from cosmos_parallel.sft_batches import (
    SftBatch,
    SftBatchConfig,
    empty_batch,
    lay_out,
    step_batches,
)
from cosmos_parallel.sft_examples import SftData


@dataclass(frozen=True, kw_only=True, slots=True)
class SftLoss:
    """Cross-entropy of a batch, as sums.

    Attributes:
        total: sum over trained tokens, in nats, with gradient.
        weight: number of trained tokens.
        metrics: ``num_correct`` trained tokens that were the most likely, ``num_tokens`` in all,
            and ``num_places`` with padding.
    """

    total: Tensor
    weight: Tensor
    metrics: dict[str, Tensor]


def sft_loss(model: nn.Module, batch: SftBatch) -> SftLoss:
    """Return the summed next-token cross-entropy over the trained tokens.

    Logits are computed only in columns where some row is trained, and turned to float32 some rows
    at a time.

    Args:
        model: a transformers causal language model.
        batch: on any device.
    """
    answers = answer_logits(model, batch)
    total, num_correct = summed_cross_entropy(answers.logits, answers.targets, answers.mask)
    return SftLoss(
        total=total,
        weight=answers.mask.sum(),
        metrics={"num_correct": num_correct, **batch_sizes(batch, total.device)},
    )


class Answers(NamedTuple):
    """Logits [N, V] of N columns, their targets [N], and which of these are trained [N]."""

    logits: Tensor
    targets: Tensor
    mask: Tensor


def answer_logits(model: nn.Module, batch: SftBatch) -> Answers:
    """Run the model once and return its logits in columns where some row is trained.

    Args:
        model: a transformers causal language model.
        batch: on any device.
    """
    device = next(model.parameters()).device
    token_ids, trainable = batch.token_ids.to(device), batch.trainable.to(device)
    columns = _columns(trainable)
    arguments: dict[str, object] = {"input_ids": token_ids, "use_cache": False}
    if batch.position_ids is not None:
        arguments["position_ids"] = batch.position_ids.to(device)
    for name, value in (batch.image_inputs or {}).items():
        arguments[name] = value.to(device)
    if _keeps_columns(model):
        logits = model(**arguments, logits_to_keep=columns).logits
    else:
        logits = model(**arguments).logits[:, columns]
    return Answers(
        logits.flatten(0, 1),
        token_ids[:, columns + 1].flatten(),
        trainable[:, columns + 1].flatten(),
    )


def batch_sizes(batch: SftBatch, device: torch.device) -> dict[str, Tensor]:
    """Return ``num_tokens`` of a batch, and ``num_places`` with padding."""
    return {
        "num_tokens": torch.tensor(batch.num_tokens, device=device),
        "num_places": torch.tensor(batch.token_ids.numel(), device=device),
    }


def fit(
    learner: Learner,
    data: SftData,
    config: SftBatchConfig,
    *,
    steps: range,
    on_step: Callable[[int, StepReport], None] = lambda step, report: None,
) -> None:
    """Train on ``data`` for ``steps``; every rank calls.

    Args:
        learner: of a causal language model.
        data: the same on every rank.
        config: how examples become batches.
        steps: ``range(0, 150)``, or ``range(70, 150)`` to go on after 70 steps.
        on_step: called after each step with its number and report, for progress.
    """
    mesh = learner.mesh
    for step in steps:
        batches = step_batches(data, config, step, rank=mesh.data_rank, size=mesh.data_size)
        on_step(step, learner.step(batches, sft_loss, filler=empty_batch(data.reader)))


def validate(learner: Learner, data: SftData, config: SftBatchConfig) -> Evaluation:
    """Return the loss over all of ``data`` without training; every rank calls."""
    mesh = learner.mesh
    rank, size = mesh.data_rank, mesh.data_size
    batches = lay_out(data.examples, config, rank=rank, size=size, reader=data.reader)
    return learner.evaluate(batches, sft_loss, filler=empty_batch(data.reader))


def _columns(trainable: Tensor) -> Tensor:
    """Return the columns [K] of [B, T] whose next token is trained in some row; one at least."""
    columns = trainable[:, 1:].any(dim=0).nonzero().flatten()
    return columns if len(columns) else torch.zeros(1, dtype=torch.int64, device=trainable.device)


def _keeps_columns(model: nn.Module) -> bool:
    return "logits_to_keep" in inspect.signature(model.forward).parameters
