"""Tensors cut into a grid of blocks: which blocks a box touches, and the maxima of its part.

With blocks of (128, 128), the box ``[100:300, 0:64]`` of a 512 x 512 tensor touches the cells
``[0:3, 0:1]`` of the grid, and holds none of them whole.
"""

import itertools
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from cosmos_weightsync.boxes import Box
from cosmos_weightsync.encodings.contract import Extents
from cosmos_weightsync.layout import IntArray

__all__ = [
    "bands",
    "block_maxima",
    "cell_volumes",
    "cut_cells",
    "grid_box",
    "grid_shape",
    "padded_blocks",
    "unpadded",
]

BAND_NUMEL = {"cpu": 1 << 20, "cuda": 1 << 26}
"""Elements that are worked on at a time by device: float32 temporaries of 4 or 256 MiB.

A processor's lie in its cache. A GPU computes on a mebielement in the time that starting it takes.
"""


def grid_shape(shape: Extents, block: Extents) -> Extents:
    """How many blocks there are in every dim; the last one may be ragged."""
    return tuple(-(-extent // size) for extent, size in zip(shape, block, strict=True))


def grid_box(box: Box, block: Extents) -> Box:
    """The cells of the grid that a box touches."""
    start = tuple(low // size for low, size in zip(box.start, block, strict=True))
    stop = tuple(-(-high // size) for high, size in zip(box.stop, block, strict=True))
    return Box(start, stop)


def cell_volumes(shape: Extents, box: Box, block: Extents) -> tuple[IntArray, IntArray]:
    """Elements of the box in every cell that it touches, and elements of these cells in all."""
    shared = np.ones((), dtype=np.int64)
    whole = np.ones((), dtype=np.int64)
    cells = grid_box(box, block)
    for dim, size in enumerate(block):
        low = np.arange(cells.start[dim], cells.stop[dim], dtype=np.int64) * size
        high = np.minimum(low + size, shape[dim])
        inside = np.minimum(high, box.stop[dim]) - np.maximum(low, box.start[dim])
        shared = np.multiply.outer(shared, inside)
        whole = np.multiply.outer(whole, high - low)
    return shared, whole


def cut_cells(shape: Extents, box: Box, block: Extents) -> tuple[IntArray, IntArray, IntArray]:
    """The cells that a box touches without holding them whole.

    Returns:
        Their positions in the (flattened) grid of the tensor, their positions in the (flattened)
        grid of the box, and how many of their elements the box holds.
    """
    shared, whole = cell_volumes(shape, box, block)
    local = np.flatnonzero((shared != whole).ravel())
    cells = grid_box(box, block)
    corner = np.unravel_index(local, cells.shape)
    moved = tuple(index + low for index, low in zip(corner, cells.start, strict=True))
    position = np.ravel_multi_index(moved, grid_shape(shape, block))
    return np.asarray(position, dtype=np.int64), local, shared.ravel()[local]


def bands(values: Tensor, box: Box, block: Extents) -> Iterator[Box]:
    """Cut the box of some values along block boundaries into what their device takes at a time."""
    return _bands(box, block, BAND_NUMEL.get(values.device.type, BAND_NUMEL["cpu"]))


def _bands(box: Box, block: Extents, max_numel: int) -> Iterator[Box]:
    cells = grid_box(box, block)
    dim = next((d for d, count in enumerate(cells.shape) if count > 1), None)
    if box.numel <= max_numel or dim is None:
        yield box
        return
    step = max(1, max_numel * cells.shape[dim] // box.numel) * block[dim]
    edges = range((box.start[dim] // block[dim]) * block[dim], box.stop[dim], step)
    for edge in edges:
        low, high = max(edge, box.start[dim]), min(edge + step, box.stop[dim])
        part = Box(
            (*box.start[:dim], low, *box.start[dim + 1 :]),
            (*box.stop[:dim], high, *box.stop[dim + 1 :]),
        )
        yield from _bands(part, block, max_numel)


def padded_blocks(values: Tensor, box: Box, block: Extents) -> Tensor:
    """The values of a box as [cells 0, block 0, cells 1, block 1, ...], padded by zero.

    In a dim where the box touches a single cell, the block is cut to the box instead of padded.
    """
    counts, sizes, fronts = _frame(box, block)
    backs = [
        count * size - front - extent
        for count, size, front, extent in zip(counts, sizes, fronts, box.shape, strict=True)
    ]
    padded = values
    if any(fronts) or any(backs):
        pads = reversed(list(zip(fronts, backs, strict=True)))
        padded = functional.pad(padded, list(itertools.chain.from_iterable(pads)))
    return padded.reshape(tuple(itertools.chain.from_iterable(zip(counts, sizes, strict=True))))


def unpadded(blocks: Tensor, box: Box, block: Extents) -> Tensor:
    """The inverse of `padded_blocks`: the elements of the box, in its shape."""
    counts, sizes, fronts = _frame(box, block)
    whole = blocks.reshape(tuple(a * b for a, b in zip(counts, sizes, strict=True)))
    inside = zip(fronts, box.shape, strict=True)
    return whole[tuple(slice(front, front + extent) for front, extent in inside)]


def _frame(box: Box, block: Extents) -> tuple[Extents, Extents, Extents]:
    """Number of cells, elements per cell, and elements before the box, in every dim."""
    cells = grid_box(box, block)
    is_one = [count == 1 for count in cells.shape]
    sizes = tuple(box.shape[dim] if one else block[dim] for dim, one in enumerate(is_one))
    fronts = tuple(
        0 if one else box.start[dim] - cells.start[dim] * block[dim]
        for dim, one in enumerate(is_one)
    )
    return cells.shape, sizes, fronts


def block_maxima(values: Tensor, box: Box, block: Extents) -> Tensor:
    """The largest magnitude of the box's part of every cell that it touches, in float32.

    NaN wins over everything.
    """
    cells = grid_box(box, block)
    maxima = torch.empty(cells.shape, dtype=torch.float32, device=values.device)
    inner = tuple(range(1, 2 * len(block), 2))
    for band in bands(values, box, block):
        part = padded_blocks(values[band.relative_to(box)], band, block)
        # two reads of memory, where magnitudes would be a read and a write of it before a read
        largest = torch.maximum(part.amax(dim=inner), -part.amin(dim=inner))
        maxima[grid_box(band, block).relative_to(cells)] = largest
    return maxima
