"""FP8 in one pass over a GPU's memory: a block is read once, its maximum found on the way.

Elsewhere maxima are taken before anything is written, which reads every value twice. With one pass
an infinity is seen too late to leave the tensors alone: who may lose what they held asks for it.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _triton

from cosmos_weightsync.encodings.blocks import bands, cut_cells, grid_box
from cosmos_weightsync.encodings.contract import Encoding, Extents
from cosmos_weightsync.encodings.quantised import E4M3_MAX, BlockFp8, RowwiseFp8
from cosmos_weightsync.shards import Shard

__all__ = ["has_one_pass", "quantise_in_one_pass", "write_blocks"]

MAX_TILE = 1 << 15
"""Elements of a block with sides rounded up to powers of two, which one program holds."""
_THREAD_VALUES = 32
_FIRST_CAPABILITY = (8, 9)  # of a GPU that converts to e4m3


def has_one_pass(encoding: Encoding, shard: Shard) -> bool:
    """Whether a shard is of whole blocks, small enough, on a GPU that can write its dtype."""
    values, spec = shard.tensor, shard.spec
    if not isinstance(encoding, RowwiseFp8 | BlockFp8) or not values.is_cuda:
        return False
    (block,) = encoding.blocks(spec)
    return (
        _triton.has_triton()
        and torch.version.hip is None
        and torch.cuda.get_device_capability(values.device) >= _FIRST_CAPABILITY
        and values.dim() in (2, 3)
        and values.stride(-1) == 1
        and _power_of_two(block[-2]) * _power_of_two(block[-1]) <= MAX_TILE
        and not len(cut_cells(spec.global_shape, spec.box, block)[0])
    )


def quantise_in_one_pass(shard: Shard, block: Extents, into: Sequence[Tensor]) -> Tensor:
    """Write values and scales as `RowwiseFp8` and `BlockFp8` do.

    Args:
        shard: Of one of theirs that `has_one_pass`.
        block: How far a block reaches.
        into: Contiguous: the values, and float32 scales, a cell for each block.

    Returns:
        The largest magnitudes, float32 [cells]; infinity for a block whose values are not finite.
    """
    values, box = shard.tensor, shard.spec.box
    cells = grid_box(box, block)
    maxima = torch.empty(cells.shape, dtype=torch.float32, device=values.device)
    scales = torch.empty_like(maxima)
    # Elsewhere than in the GPU's memory values are copied, some at a time.
    for band in [box] if into[0].is_cuda else bands(values, box, block):
        within = band.relative_to(box)
        mine = grid_box(band, block).relative_to(cells)
        target = into[0][within]
        found = target if target.is_cuda else torch.empty_like(target, device=values.device)
        write_blocks(values[within], found, maxima[mine], scales[mine], block)
        if found is not target:
            target.copy_(found, non_blocking=True)
    into[1].copy_(scales, non_blocking=True)
    return maxima


def write_blocks(
    values: Tensor, found: Tensor, maxima: Tensor, scales: Tensor, block: Extents
) -> None:
    """Read blocks of a matrix, or of a stack of them, and write what becomes of them.

    Args:
        values: Floating [(k,) m, n], rows contiguous.
        found: Gets values over scales, in its dtype; same shape, rows contiguous.
        maxima: Gets the largest magnitudes, float32, a cell for each block.
        scales: Gets the scales, likewise.
        block: How far a block reaches.
    """
    from cosmos_weightsync.encodings.one_pass_kernel import quantise_blocks

    values, found, maxima, scales = (
        tensor if tensor.dim() == 3 else tensor[None] for tensor in (values, found, maxima, scales)
    )
    matrices, rows, columns = values.shape
    tile = (_power_of_two(block[-2]), _power_of_two(block[-1]))
    _, down, across = maxima.shape
    kernel: Any = quantise_blocks
    with torch.cuda.device_of(values):
        kernel[(down * across, matrices)](
            values,
            found,
            maxima,
            scales,
            rows,
            columns,
            across,
            *values.stride()[:2],
            *found.stride()[:2],
            *maxima.stride()[:2],
            largest=E4M3_MAX,
            tiny=torch.finfo(torch.float32).tiny,
            block_rows=block[-2],
            block_columns=block[-1],
            tile_rows=tile[0],
            tile_columns=tile[1],
            num_warps=max(1, min(16, tile[0] * tile[1] // (32 * _THREAD_VALUES))),
        )


def _power_of_two(size: int) -> int:
    return 1 << (size - 1).bit_length()
