"""The Triton kernel of `one_pass`; imported where a GPU quantises, since Triton comes with CUDA."""

# Triton's language has no types: what stands in a kernel is not Python.
# pyright: basic, reportIndexIssue=false, reportCallIssue=false, reportArgumentType=false
# pyright: reportOperatorIssue=false

import triton
import triton.language as tl

__all__ = ["quantise_blocks"]


@triton.jit
def quantise_blocks(
    source,
    target,
    maxima,
    scales,
    rows,
    columns,
    blocks_across,
    source_matrix,
    source_row,
    target_matrix,
    target_row,
    cells_matrix,
    cells_row,
    largest: tl.constexpr,
    tiny: tl.constexpr,
    block_rows: tl.constexpr,
    block_columns: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_columns: tl.constexpr,
):
    """One program reads one block, and writes its values, its scale and its largest magnitude.

    Tiles are blocks with sides that are powers of two. Strides are in elements. The magnitude of a
    block with a value that is not finite is infinity.
    """
    row, column = tl.program_id(0) // blocks_across, tl.program_id(0) % blocks_across
    matrix = tl.program_id(1).to(tl.int64)
    down = tl.arange(0, tile_rows)[:, None]
    across = tl.arange(0, tile_columns)[None, :]
    i = row * block_rows + down
    j = column * block_columns + across
    inside = (down < block_rows) & (across < block_columns) & (i < rows) & (j < columns)
    i = i.to(tl.int64)
    read = source + matrix * source_matrix + i * source_row + j
    values = tl.load(read, mask=inside, other=0.0).to(tl.float32)
    magnitudes = tl.abs(values)
    magnitudes = tl.where(magnitudes < float("inf"), magnitudes, float("inf"))  # of NaN too
    maximum = tl.max(tl.max(magnitudes, axis=1), axis=0)
    scale = tl.where(maximum > 0, tl.maximum(tl.div_rn(maximum, largest), tiny), 1.0)
    quotients = tl.div_rn(values, tl.full(values.shape, 0.0, tl.float32) + scale)
    written = target + matrix * target_matrix + i * target_row + j
    tl.store(written, quotients.to(target.dtype.element_ty), mask=inside)
    cell = matrix * cells_matrix + row * cells_row + column
    tl.store(maxima + cell, maximum)
    tl.store(scales + cell, scale)
