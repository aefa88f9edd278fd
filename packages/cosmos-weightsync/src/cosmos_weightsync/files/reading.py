"""Boxes out of safetensors files: only the chunks that hold them, every chunk checked."""

from collections.abc import Iterator

import torch
from torch import Tensor

from cosmos_weightsync.boxes import Box
from cosmos_weightsync.byte_rows import flat_bytes, lent_bytes
from cosmos_weightsync.files.manifests import CHUNK_BYTES, StoredBox, read_checked
from cosmos_weightsync.files.storage import Storage
from cosmos_weightsync.layout import ITEM_BYTES
from cosmos_weightsync.shards import torch_dtype

__all__ = ["BoxReader", "row_strides", "slabs"]


def row_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Elements from one index to the next in every dim of a contiguous tensor."""
    strides: list[int] = []
    step = 1
    for extent in reversed(shape):
        strides.append(step)
        step *= extent
    return tuple(reversed(strides))


def _span(box: Box, origin: Box) -> tuple[int, int]:
    """The first element of a box within a stored one, and one past the last."""
    strides = row_strides(origin.shape)
    low = sum((a - b) * step for a, b, step in zip(box.start, origin.start, strides, strict=True))
    high = sum(
        (a - 1 - b) * step for a, b, step in zip(box.stop, origin.start, strides, strict=True)
    )
    return low, high + 1


def slabs(box: Box, origin: Box, max_elements: int) -> Iterator[Box]:
    """Cut a box into parts that each span at most so many elements of the stored one."""
    low, high = _span(box, origin)
    if high - low <= max_elements or box.numel == 1:
        yield box
        return
    strides = row_strides(origin.shape)
    dim = next(d for d, extent in enumerate(box.shape) if extent > 1)
    rows = max(1, min(box.shape[dim] - 1, max_elements // max(1, strides[dim])))
    for first in range(box.start[dim], box.stop[dim], rows):
        last = min(first + rows, box.stop[dim])
        start = (*box.start[:dim], first, *box.start[dim + 1 :])
        stop = (*box.stop[:dim], last, *box.stop[dim + 1 :])
        yield from slabs(Box(start, stop), origin, max_elements)


class BoxReader:
    """Reads boxes of one directory, each call with a buffer of its own.

    Args:
        storage: Where the files are.
        directory: In which directory.
        buffer_bytes: How large a buffer may be; at least three chunks.
    """

    def __init__(self, storage: Storage, directory: str, buffer_bytes: int) -> None:
        self._storage = storage
        self._directory = directory
        self._buffer_bytes = max(buffer_bytes, 3 * CHUNK_BYTES)

    def read_into(self, source: StoredBox, box: Box, target: Tensor) -> int:
        """Fill ``target`` with ``box``, which lies inside the stored one; returns bytes read.

        Raises:
            DigestError: a chunk is not what was written.
            StorageError: the file cannot be read.
        """
        spec = source.stored.spec
        item_bytes = ITEM_BYTES[spec.dtype]
        room = self._buffer_bytes - 2 * CHUNK_BYTES
        buffer = torch.empty(0, dtype=torch.uint8)
        total = 0
        for part in slabs(box, spec.box, max(1, room // item_bytes)):
            first, last = (edge * item_bytes for edge in _span(part, spec.box))
            low = first // CHUNK_BYTES * CHUNK_BYTES
            high = min(-(-last // CHUNK_BYTES) * CHUNK_BYTES, spec.num_bytes)
            if buffer.numel() < high - low:
                buffer = torch.empty(high - low, dtype=torch.uint8)
            view = buffer[: high - low]
            read_checked(self._storage, self._directory, source, low, _bytes_of(view))
            total += high - low
            count = view.numel() // item_bytes * item_bytes
            typed = view[:count].view(torch_dtype(spec.dtype))
            window = typed.as_strided(
                part.shape, row_strides(spec.box.shape), (first - low) // item_bytes
            )
            target[part.relative_to(box)].copy_(window)
        return total


def _bytes_of(view: Tensor) -> memoryview:
    return lent_bytes(flat_bytes(view)).data
