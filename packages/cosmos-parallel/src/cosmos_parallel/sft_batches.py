"""Batches of supervised examples: which examples a step trains on, and how they are laid out.

The sample stream is a function of seed and step alone: nothing has to be stored to go on after a
restart, and every rank computes its own share.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from cosmos_parallel.packing import plan_micro_batches
from cosmos_parallel.sft_data import SftData, SftExample


@dataclass(frozen=True, kw_only=True, slots=True)
class SftBatch:
    """B rows of T tokens, padded on the right.

    Attributes:
        token_ids: int64[B, T].
        trainable: bool[B, T]; false on padding.
        position_ids: int64[B, T], counting from 0 in each of several examples in a row; ``None``
            when every row is one example.
        num_tokens: tokens that are not padding.
    """

    token_ids: Tensor
    trainable: Tensor
    position_ids: Tensor | None
    num_tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class SftBatchConfig:
    """How examples become batches.

    Attributes:
        batch_size: examples in a step, over all ranks.
        max_tokens: tokens in a micro-batch, padding included; a longer example is one by itself.
        layout: ``padded`` gives each example a row; ``packed`` puts several into a row, which
            saves padding where lengths differ much and costs an attention mask.
        bucket: row lengths are rounded up to a multiple of this.
        seed: of the order of examples.
    """

    batch_size: int = 64
    max_tokens: int = 16384
    layout: Literal["padded", "packed"] = "padded"
    bucket: int = 16
    seed: int = 0

    def __post_init__(self) -> None:
        """Check the ranges.

        Raises:
            ValueError: if a size is below 1.
        """
        for name in ("batch_size", "max_tokens", "bucket"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be 1 or more")


def step_batches(
    data: SftData, config: SftBatchConfig, step: int, *, rank: int = 0, size: int = 1
) -> list[SftBatch]:
    """Return the micro-batches of this rank in ``step``, counted from 0; see `step_examples`."""
    chosen = [data.examples[i] for i in step_examples(len(data.examples), config, step)]
    return lay_out(chosen, config, rank=rank, size=size)


def step_examples(num_examples: int, config: SftBatchConfig, step: int) -> list[int]:
    """Return which of ``num_examples`` make ``step``, counted from 0.

    Examples come in a new order in every pass over the data; a step may span two passes.
    """
    first, last = step * config.batch_size, (step + 1) * config.batch_size
    chosen: list[int] = []
    for epoch in range(first // num_examples, -(-last // num_examples)):
        order = np.random.default_rng([config.seed, epoch]).permutation(num_examples)
        start = max(first - epoch * num_examples, 0)
        chosen += order[start : last - epoch * num_examples].tolist()
    return chosen


def lay_out(
    examples: Sequence[SftExample], config: SftBatchConfig, *, rank: int = 0, size: int = 1
) -> list[SftBatch]:
    """Return this rank's share of ``examples`` as micro-batches.

    Packed: each micro-batch is one row within the budget, and ranks get about equal numbers of
    tokens and of micro-batches. Padded: longest first, and ranks get equal numbers of examples, to
    one, and about equal numbers of tokens.
    """
    if config.layout == "packed":
        return _packed(examples, config, rank=rank, size=size)
    ordered = sorted(examples, key=lambda example: -len(example.token_ids))
    # there and back again, so that the first rank does not get the longest of every round
    rounds = [ordered[start : start + size] for start in range(0, len(ordered), size)]
    mine = [
        members[size - 1 - rank] if index % 2 and len(members) == size else members[rank]
        for index, members in enumerate(rounds)
        if rank < len(members)
    ]
    return [_collate(group, config) for group in _group([[e] for e in mine], config)]


def empty_batch() -> SftBatch:
    """Return a batch with nothing to train on: the filler of ranks without examples."""
    return SftBatch(
        token_ids=torch.zeros((1, 2), dtype=torch.int64),
        trainable=torch.zeros((1, 2), dtype=torch.bool),
        position_ids=None,
        num_tokens=0,
    )


def _packed(
    examples: Sequence[SftExample], config: SftBatchConfig, *, rank: int, size: int
) -> list[SftBatch]:
    if not examples:
        return []
    lengths = [len(example.token_ids) for example in examples]
    # rows are rounded up to the bucket, so that budget and bucket hold together
    budget = max(config.max_tokens // config.bucket * config.bucket, 1)
    parts = plan_micro_batches(lengths, max_tokens=budget, num_ranks=size)[rank]
    return [_collate([[examples[index] for index in part]], config) for part in parts]


def _group(
    rows: Sequence[list[SftExample]], config: SftBatchConfig
) -> list[list[list[SftExample]]]:
    """Cut rows, longest first, into groups whose padded size is within the budget."""
    groups: list[list[list[SftExample]]] = []
    width = 0
    for row in sorted(rows, key=lambda row: -_row_length(row)):
        if not groups or (len(groups[-1]) + 1) * width > config.max_tokens:
            groups.append([])
            width = _round_up(_row_length(row), config.bucket)
        groups[-1].append(row)
    return groups


def _collate(rows: Sequence[list[SftExample]], config: SftBatchConfig) -> SftBatch:
    # two at least: a column and the next one, which it predicts
    width = _round_up(max([2, *(_row_length(row) for row in rows)]), config.bucket)
    token_ids = np.zeros((len(rows), width), dtype=np.int64)
    trainable = np.zeros((len(rows), width), dtype=np.bool_)
    position_ids = np.zeros((len(rows), width), dtype=np.int64)
    for index, row in enumerate(rows):
        start = 0
        for example in row:
            end = start + len(example.token_ids)
            token_ids[index, start:end] = example.token_ids
            trainable[index, start:end] = example.trainable
            trainable[index, start] = False  # nothing of its own comes before it
            position_ids[index, start:end] = np.arange(end - start)
            start = end
        position_ids[index, start:] = np.arange(width - start)
    return SftBatch(
        token_ids=torch.from_numpy(token_ids),
        trainable=torch.from_numpy(trainable),
        position_ids=torch.from_numpy(position_ids) if config.layout == "packed" else None,
        num_tokens=sum(_row_length(row) for row in rows),
    )


def _row_length(row: Sequence[SftExample]) -> int:
    return sum(len(example.token_ids) for example in row)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
