"""Samples of packed rows in blocks of like length: attention without a mask of a row's square.

    row        a a a a b b c c c        10 scores per sample of 4, 3 of 2, 6 of 3
    blocks     a a a a   b b -          samples of like length side by side, causal in each;
                         c c c          padding lives in the attention alone
    row        a a a a b b c c c        back in place

Everything else of a model sees the row and no padding.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ParamSpec

import torch
from torch import Tensor

_LEAST_BLOCK = 16
_Arguments = ParamSpec("_Arguments")
MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
# [S, L, heads, E] of queries, keys and values [S, heads, L, D], and what each may attend to
Attend = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class SampleBlock:
    """S samples of like length, side by side.

    Attributes:
        places: int64[S, L], where in the flattened rows each column comes from; a sample's last
            token again where the sample is over.
        mask: bool[S, 1, L, L], what each may attend to; ``None`` for everything before it.
    """

    places: Tensor
    mask: Tensor | None


@dataclass(frozen=True, slots=True, eq=False)
class PackedRows:
    """What attention is handed in place of a mask: how rows fall apart into samples.

    Attributes:
        blocks: every sample once.
        places: int64[C], ``places`` of all blocks, one after the other.
        home: int64[B * T], for each place of the flattened rows its index among the C columns.
        own: bool[C, 1], which columns are a token of their own, and no repeated last one.
        offsets: int32[samples + 1], where samples begin in the flattened rows, and where they end.
        longest: tokens of the longest sample.
    """

    blocks: tuple[SampleBlock, ...]
    places: Tensor
    home: Tensor
    own: Tensor
    offsets: Tensor
    longest: int


def packed_rows(starts: Tensor, mask_function: MaskFunction | None = None) -> PackedRows:
    """Sort the samples of rows into blocks of like length.

    Args:
        starts: bool[B, T], true at the first token of every sample; a row's first token starts
            one anyway.
        mask_function: transformers' ``(row, head, query, key) -> may attend``, where that is
            narrower than causal within a sample (sliding windows).
    """
    flat = starts.clone()
    flat[:, 0] = True
    begins: list[int] = flat.flatten().nonzero().flatten().tolist()
    ends = [*begins[1:], starts.numel()]
    order = sorted(range(len(begins)), key=lambda index: begins[index] - ends[index])
    groups: list[list[tuple[int, int]]] = []
    width = 0
    for index in order:
        length = ends[index] - begins[index]
        if not groups or width - length > max(_LEAST_BLOCK, width // 4):
            groups.append([])
            width = length
        groups[-1].append((begins[index], ends[index]))
    blocks = tuple(_block(group, starts.shape[1], mask_function, starts.device) for group in groups)
    places = torch.cat([block.places.flatten() for block in blocks])
    own = torch.cat([_own_columns(block.places).flatten() for block in blocks])
    home = torch.empty(starts.numel(), dtype=torch.int64, device=starts.device)
    home[places[own]] = own.nonzero().flatten()
    offsets = torch.tensor([*begins, starts.numel()], dtype=torch.int32, device=starts.device)
    longest = blocks[0].places.shape[1]
    return PackedRows(blocks, places, home, own[:, None], offsets, longest)


def _called_as_it_is(function: Callable[_Arguments, Tensor]) -> Callable[_Arguments, Tensor]:
    kept_out: Any = torch.compiler.disable(function)
    return kept_out


@_called_as_it_is
def attend_in_blocks(
    query: Tensor, key: Tensor, value: Tensor, packed: PackedRows, attend: Attend
) -> Tensor:
    """Attend within each sample of packed rows.

    Compiled layers call it as it is: rows fall apart into another number of blocks nearly each
    time, and torch compiles a function for eight of them at most.

    Args:
        query: [B, T, heads, D].
        key: [B, T, key heads, D].
        value: [B, T, key heads, E].
        packed: how the rows fall apart.
        attend: what is done with the samples of a block, as with rows of no more than a sample.

    Returns:
        [B, T, heads, E].
    """
    columns = [_ToColumns.apply(part.flatten(0, 1), packed) for part in (query, key, value)]
    outputs: list[Tensor] = []
    start = 0
    for block in packed.blocks:
        end = start + block.places.numel()
        queries, keys, values = (
            part[start:end].unflatten(0, block.places.shape).transpose(1, 2) for part in columns
        )
        outputs.append(attend(queries, keys, values, block.mask).flatten(0, 1))
        start = end
    joined = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return _ToRows.apply(joined, packed).unflatten(0, query.shape[:2])


class _ToColumns(torch.autograd.Function):
    """Tokens from their rows to their columns; backward reads instead of adding up.

    A repeated token gets no gradient: its query's output is dropped, and no real query sees its
    key or value.
    """

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, packed: PackedRows) -> Tensor:  # torch's own context
        """Return [C, ...] of [N, ...]."""
        ctx.packed = packed
        return tokens.index_select(0, packed.places)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor, None]:
        """Return the gradient of the tokens."""
        return grad_outputs[0].index_select(0, ctx.packed.home), None


class _ToRows(torch.autograd.Function):
    """Tokens from their columns back to their rows."""

    @staticmethod
    def forward(ctx: Any, columns: Tensor, packed: PackedRows) -> Tensor:  # torch's own context
        """Return [N, heads, E] of [C, heads, E]."""
        ctx.packed = packed
        return columns.flatten(1).index_select(0, packed.home).unflatten(1, columns.shape[1:])

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor, None]:
        """Return the gradient of the columns; that of repeated ones is 0."""
        grad = grad_outputs[0]
        columns = grad.flatten(1).index_select(0, ctx.packed.places)
        return columns.mul_(ctx.packed.own).unflatten(1, grad.shape[1:]), None


def _own_columns(places: Tensor) -> Tensor:
    """Return which columns of [S, L] are a token of their own, and no repeated last one."""
    own = torch.ones_like(places, dtype=torch.bool)
    own[:, 1:] = places[:, 1:] != places[:, :-1]
    return own


def _block(
    samples: list[tuple[int, int]],
    width: int,
    mask_function: MaskFunction | None,
    device: torch.device,
) -> SampleBlock:
    first = torch.tensor([begin for begin, _ in samples], device=device)
    last = torch.tensor([end - 1 for _, end in samples], device=device)
    columns = torch.arange(int((last - first).max()) + 1, device=device)
    places = torch.minimum(first[:, None] + columns, last[:, None])
    row, head = first // width, torch.zeros_like(first)
    if mask_function is None or bool(mask_function(row, head, last % width, first % width).all()):
        return SampleBlock(places, None)  # the last token sees the first: plainly causal
    inside = places % width
    seen = mask_function(
        row[:, None, None], head[:, None, None], inside[:, :, None], inside[:, None, :]
    )
    causal = columns[:, None] >= columns[None, :]
    # a repeated token sees at least itself, or its softmax would be over nothing
    seen = (seen & causal) | torch.eye(len(columns), dtype=torch.bool, device=device)
    return SampleBlock(places, seen[:, None])
