"""Sequences that several ranks have a stretch of each (context parallelism), and packed ones."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from cosmos_parallel.sample_blocks import Attend, PackedRows, attend_in_blocks, packed_rows


class _GatherSequence(torch.autograd.Function):
    """Whole sequences from every rank's stretch; gradients are summed and cut up again."""

    @staticmethod
    def forward(ctx: Any, stretch: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return joined(stretch, group)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        # a copy: what is added up in place may be somebody else's gradient as well
        whole = grad_outputs[0].clone(memory_format=torch.contiguous_format)
        dist.all_reduce(whole, group=ctx.group)
        return whole.chunk(ctx.group.size(), dim=1)[ctx.group.rank()].contiguous(), None


def joined(stretch: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return ``[B, T, ...]`` from every rank's ``[B, T / ranks, ...]``, without gradient."""
    parts = [torch.empty_like(stretch) for _ in range(group.size())]
    dist.all_gather(parts, stretch.contiguous(), group=group)
    return torch.cat(parts, dim=1)


def gather_sequence(stretch: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return ``[B, T, ...]`` from every rank's ``[B, T / ranks, ...]``, with gradient.

    The gradient of a rank's stretch is the sum of what all ranks of the group did with it.
    """
    return _GatherSequence.apply(stretch, group)  # pyright: ignore[reportReturnType]


@dataclass(frozen=True, slots=True)
class Visibility:
    """What each token may look at; the same for all layers of one forward pass.

    Without mask and packed rows every token sees all before it.

    Attributes:
        mask: ``[B, 1, T / ranks, T]``, true where a query of this rank's stretch sees a key; of
            rows that a group shares.
        group: ranks that have a stretch of every sequence each; ``None`` for whole sequences.
        packed: how whole rows fall apart into samples, where one holds several.
    """

    mask: Tensor | None
    group: dist.ProcessGroup | None
    packed: PackedRows | None = None

    @classmethod
    def of(
        cls, positions: Tensor, group: dist.ProcessGroup | None, blocks: Tensor | None = None
    ) -> "Visibility":
        """Read it off positions, which start at 0 again where another sample begins.

        Args:
            positions: ``[B, T]`` of the whole sequences.
            group: as the attribute.
            blocks: ``[B, T]``, a number of their own for tokens that see each other both ways, and
                0 for all others; of rows that a group shares.
        """
        if group is None:
            starts = positions == 0
            several = bool(starts[:, 1:].any())
            return cls(None, None, packed_rows(starts) if several else None)
        samples = (positions == 0).cumsum(dim=1)
        index = torch.arange(positions.shape[1], device=positions.device)
        mine = index.chunk(group.size())[group.rank()]
        seen = (mine[:, None] >= index) & (samples[:, mine, None] == samples[:, None, :])
        if blocks is not None:
            shown = blocks[:, mine, None]
            seen = seen | ((shown > 0) & (shown == blocks[:, None, :]))
        return cls(seen[:, None], group)

    def mask_of(self, window: int | None) -> Tensor:
        """Return the mask of shared rows, narrowed to the last ``window`` tokens if given.

        Args:
            window: how many tokens a query sees, itself the last of them.
        """
        assert self.mask is not None, "ranks that share rows have a mask"
        assert self.group is not None, "whole rows have no mask"
        if window is None:
            return self.mask
        index = torch.arange(self.mask.shape[3], device=self.mask.device)
        mine = index.chunk(self.group.size())[self.group.rank()]
        return self.mask & (mine[:, None] - index < window)


def attend_where_seen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sight: Visibility,
    window: int | None,
    attend: Attend,
) -> Tensor:
    """Attend within samples of packed rows, from a stretch to rows that ranks share, or in rows.

    Args:
        query: ``[B, L, heads, D]``.
        key: ``[B, L, key heads, D]``.
        value: ``[B, L, key heads, E]``.
        sight: of the rows.
        window: how many tokens a query sees, itself the last; ``None`` for all before it.
        attend: does it where heads come before tokens, and keeps to the window by itself where it
            is given no mask.
    """
    if sight.packed is not None:
        return attend_in_blocks(query, key, value, sight.packed, attend)
    mask = None
    if sight.group is not None:
        key, value = gather_sequence(key, sight.group), gather_sequence(value, sight.group)
        mask = sight.mask_of(window)
    return attend(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), mask)


def causal_mask(queries: Tensor, window: int | None) -> Tensor:
    """Return what each token of whole samples sees: bool ``[L, L]``.

    Args:
        queries: ``[..., L, D]``.
        window: how many tokens a query sees, itself the last; ``None`` for all before it.
    """
    index = torch.arange(queries.shape[-2], device=queries.device)
    distance = index[:, None] - index
    return distance >= 0 if window is None else (distance >= 0) & (distance < window)


def padded_rows(
    token_ids: Tensor, position_ids: Tensor | None, multiple_of: int
) -> tuple[Tensor, Tensor]:
    """Return tokens and positions of rows whose length every rank of a group can have a share of.

    What is added belongs to the sample before it (no position is 0), after all its tokens.

    Args:
        token_ids: ``[B, T]``.
        position_ids: ``[B, T]``; ``None`` where every row is one sample.
        multiple_of: the length becomes a multiple of this.
    """
    length = token_ids.shape[1]
    if position_ids is None:
        position_ids = torch.arange(length, device=token_ids.device).expand_as(token_ids)
    missing = (0, -length % multiple_of)
    return functional.pad(token_ids, missing), functional.pad(position_ids, missing, value=1)


def kept_columns(hidden: Tensor, length: int, keep: int | Tensor) -> Tensor:
    """Return those columns of ``[B, T', dim]`` of which a caller wants logits.

    Args:
        hidden: of padded rows.
        length: columns that the caller gave.
        keep: the last so many of them (0 for all), or the columns themselves.
    """
    given = hidden[:, :length]
    if isinstance(keep, Tensor):
        return given[:, keep]
    return given[:, -keep:] if keep else given
