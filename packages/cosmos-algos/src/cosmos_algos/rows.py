"""Rows of a padded batch: all samples put into one, or one more in which nothing is trained."""

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from cosmos_algos.batch import TokenBatch

_OF_SAMPLES = frozenset({"denominators", "segments"})
# names by which models of transformers are told which tokens are pictures
_OF_TOKENS = frozenset({"mm_token_type_ids", "token_type_ids"})


def in_one_row(batch: TokenBatch) -> TokenBatch:
    """Return the batch as one row ``[1, N]`` of its N tokens, without padding.

    ``segments`` tells the samples apart, and ``position_ids`` starts again with each, which is how
    models are told. Whatever a loss makes of the row, it makes of the padded batch. Pictures among
    the tokens need their own ``position_ids`` in ``image_inputs``.

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
        image_inputs=_in_one_row(batch.image_inputs, batch.valid),
    )


def with_idle_rows(batch: TokenBatch, rows: Sequence[Sequence[int]]) -> TokenBatch:
    """Return the batch with further rows of tokens, none of them trained; they weigh nothing.

    Args:
        batch: one sample in each row.
        rows: token ids of each further row.
    """
    width = max(batch.token_ids.shape[1], *(len(row) for row in rows))
    moved = {
        field.name: _padded(value, len(rows), width if value.dim() > 1 else None)
        for field in fields(batch)
        if isinstance(value := getattr(batch, field.name), Tensor)
    }
    for index, row in enumerate(rows, start=batch.token_ids.shape[0]):
        moved["token_ids"][index, : len(row)] = torch.tensor(row)
        moved["valid"][index, : len(row)] = True
    names = batch.names + tuple(f"idle row {index}" for index in range(len(rows)))
    return replace(batch, **moved, names=names)


def _padded(values: Tensor, more_rows: int, width: int | None) -> Tensor:
    """Return ``values`` with further rows of 0, and so many columns."""
    shape = [values.shape[0] + more_rows, *values.shape[1:]]
    if width is not None:
        shape[1] = width
    larger = values.new_zeros(shape)
    kept = larger[: values.shape[0]]
    (kept if width is None else kept[:, : values.shape[1]]).copy_(values)
    return larger


def _in_one_row(
    inputs: Mapping[str, Tensor] | None, valid: Bool[Tensor, "B T"]
) -> dict[str, Tensor] | None:
    """Move what is said of tokens; pictures are in the order of the rows, and stay."""
    if inputs is None:
        return None
    moved = dict(inputs)
    for name, value in inputs.items():
        if name in _OF_TOKENS:
            moved[name] = value[valid][None]
        elif name == "position_ids":
            moved[name] = value[:, valid][:, None]
    return moved


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
