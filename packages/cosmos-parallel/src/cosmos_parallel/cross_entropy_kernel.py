"""The Triton kernels of `cross_entropy`; imported where logits lie on a GPU."""

# Triton's language has no types: what stands in a kernel is not Python.
# pyright: basic, reportIndexIssue=false, reportCallIssue=false, reportArgumentType=false
# pyright: reportOperatorIssue=false

import torch
import triton
import triton.language as tl
from torch import Tensor

_LANES = 4096


@triton.jit
def _row_sums(
    logits, targets, normalisers, logprobs, hits, columns, row_stride, lanes: tl.constexpr
):
    """One program reads a row: the log of its sum of exponentials, and what the target has."""
    row = tl.program_id(0).to(tl.int64)
    start_of_row = logits + row * row_stride
    lane = tl.arange(0, lanes)
    largest = tl.full([lanes], -3.0e38, tl.float32)
    sums = tl.zeros([lanes], tl.float32)
    places = tl.full([lanes], 0x7FFFFFFF, tl.int32)
    for first in range(0, columns, lanes):
        column = first + lane
        inside = column < columns
        values = tl.load(start_of_row + column, mask=inside, other=-3.0e38).to(tl.float32)
        places = tl.where(inside & (values > largest), column, places)
        larger = tl.maximum(largest, values)
        sums = sums * tl.exp(largest - larger) + tl.where(inside, tl.exp(values - larger), 0.0)
        largest = larger
    maximum = tl.max(largest, axis=0)
    likeliest = tl.min(tl.where(largest == maximum, places, 0x7FFFFFFF), axis=0)
    normaliser = maximum + tl.log(tl.sum(sums * tl.exp(largest - maximum), axis=0))
    target = tl.load(targets + row)
    own = tl.load(start_of_row + target).to(tl.float32)
    tl.store(normalisers + row, normaliser)
    tl.store(logprobs + row, own - normaliser)
    tl.store(hits + row, (likeliest == target).to(tl.int32))


@triton.jit
def _row_slopes(
    logits, targets, kept, normalisers, factor, slopes, columns, row_stride, lanes: tl.constexpr
):
    """One program writes some of a row of the gradient: the probabilities, less 1 at the target."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * lanes + tl.arange(0, lanes)
    inside = column < columns
    values = tl.load(logits + row * row_stride + column, mask=inside, other=-3.0e38).to(tl.float32)
    slope = tl.exp(values - tl.load(normalisers + row))
    slope -= tl.where(column == tl.load(targets + row), 1.0, 0.0)
    slope = tl.where(tl.load(kept + row) != 0, slope * tl.load(factor), 0.0)
    tl.store(slopes + row * columns + column, slope.to(slopes.dtype.element_ty), mask=inside)


def row_sums(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Read every row once.

    Args:
        logits: floating [N, V], rows contiguous.
        targets: int64[N], contiguous.

    Returns:
        The log of the sum of the exponentials float32[N], the log-probability of the target
        float32[N], whether it is the likeliest int32[N].
    """
    normalisers = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    logprobs, hits = torch.empty_like(normalisers), torch.empty_like(targets, dtype=torch.int32)
    if not len(logits):
        return normalisers, logprobs, hits
    with torch.cuda.device_of(logits):
        _row_sums[(len(logits),)](
            logits,
            targets,
            normalisers,
            logprobs,
            hits,
            logits.shape[1],
            logits.stride(0),
            lanes=_LANES,
            num_warps=8,
        )
    return normalisers, logprobs, hits


def row_slopes(
    logits: Tensor, targets: Tensor, mask: Tensor, normalisers: Tensor, factor: Tensor
) -> Tensor:
    """Return the gradient of the masked sum of cross-entropies, in the dtype of the logits [N, V].

    Args:
        logits: as of `row_sums`.
        targets: as of `row_sums`.
        mask: bool[N], contiguous.
        normalisers: from `row_sums`.
        factor: float32[1], by which the gradient is multiplied.
    """
    rows, columns = logits.shape
    slopes = torch.empty_like(logits, memory_format=torch.contiguous_format)
    if not rows:
        return slopes
    with torch.cuda.device_of(logits):
        _row_slopes[(rows, triton.cdiv(columns, _LANES))](
            logits,
            targets,
            mask.view(torch.uint8),
            normalisers,
            factor,
            slopes,
            columns,
            logits.stride(0),
            lanes=_LANES,
            num_warps=8,
        )
    return slopes
