"""Samples of a padded batch put into one row: a model pass over their tokens and nothing else."""

from dataclasses import fields, replace

import torch
from jaxtyping import Int
from torch import Tensor

from cosmos_algos.batch import TokenBatch

_OF_SAMPLES = frozenset({"denominators", "segments"})


def in_one_row(batch: TokenBatch) -> TokenBatch:
    """Return the batch as one row ``[1, N]`` of its N tokens, without padding.

    ``segments`` tells the samples apart, and ``position_ids`` starts again with each, which is how
    models are told. Whatever a loss makes of the row, it makes of the padded batch.

    Args:
        batch: one sample in each row. A batch without any token is returned as it is.
    """
    if not batch.valid.any() or batch.segments is not None:
        return batch
    moved = {
        field.name: value[batch.valid][None]
        for field in fields(batch)
        if field.name not in _OF_SAMPLES and isinstance(value := getattr(batch, field.name), Tensor)
    }
    numbers = torch.arange(batch.valid.shape[0], device=batch.valid.device)
    return replace(
        batch,
        **moved,
        segments=numbers[:, None].expand_as(batch.valid)[batch.valid][None],
        denominators=batch.denominators.sum()[None],
    )


def position_ids(segments: Int[Tensor, "B T"]) -> Int[Tensor, "B T"]:
    """Count each sample's tokens from 0.

    Args:
        segments: number of the sample that each column belongs to; a sample's columns are side by
            side.
    """
    columns = torch.arange(segments.shape[1], device=segments.device).expand_as(segments)
    starts = torch.ones_like(segments, dtype=torch.bool)
    starts[:, 1:] = segments[:, 1:] != segments[:, :-1]
    return columns - (columns * starts).cummax(-1).values
