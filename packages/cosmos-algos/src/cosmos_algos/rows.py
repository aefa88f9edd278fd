"""Rows of a padded batch: all samples put into one, or tokens behind them that are not trained."""

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from cosmos_algos.batch import TokenBatch
from cosmos_algos.errors import ShapeError

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


def with_idle_tokens(
    batch: TokenBatch, tokens: Sequence[int], *, valid: bool = False
) -> tuple[TokenBatch, int]:
    """Return the batch with tokens behind its shortest row, and which row that is.

    None of them is trained, and no token before them sees them: the loss is that of the batch.

    Args:
        batch: one sample in each row, right-padded.
        tokens: ids.
        valid: have them count as the sample's, so that `in_one_row` keeps them; else they are
            padding.
    """
    lengths = batch.valid.sum(-1)
    row = int(lengths.argmin())
    start, end = int(lengths[row]), int(lengths[row]) + len(tokens)
    width = max(batch.token_ids.shape[1], end)
    moved = {
        field.name: _widened(value, width)
        for field in fields(batch)
        if isinstance(value := getattr(batch, field.name), Tensor) and value.dim() > 1
    }
    moved["token_ids"][row, start:end] = torch.tensor(tokens)
    moved["valid"][row, start:end] = valid
    return replace(batch, **moved), row


def check_rows(batch: TokenBatch) -> None:
    """Refuse rows that a causal model without a mask would read as others.

    Raises:
        ShapeError: says what to do.
    """
    begins_late = batch.valid[:, 1:] & ~batch.valid[:, :-1]
    other_target = (batch.token_ids[:, 1:] != batch.targets[:, :-1]) & batch.trainable[:, :-1]
    if not bool((begins_late | other_target).any()):
        return
    raise ShapeError(
        "scores: rows must be right-padded, and the target of a trained column be the next token; "
        "for others make scores of a forward pass of your own: scores_from_logits(logits, "
        "batch.targets), or its values"
    )


def _widened(values: Tensor, width: int) -> Tensor:
    """Return a copy with so many columns, the new ones 0."""
    larger = values.new_zeros(values.shape[0], width, *values.shape[2:])
    larger[:, : values.shape[1]] = values
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

    Raises:
        ShapeError: if they are not rows of columns.
    """
    if segments.dim() != 2:
        raise ShapeError(f"segments {tuple(segments.shape)}; they must be [B, T]")
    columns = torch.arange(segments.shape[1], device=segments.device).expand_as(segments)
    starts = torch.ones_like(segments, dtype=torch.bool)
    starts[:, 1:] = segments[:, 1:] != segments[:, :-1]
    return columns - (columns * starts).cummax(-1).values
