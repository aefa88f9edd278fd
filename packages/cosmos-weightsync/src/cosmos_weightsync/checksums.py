"""xxh3_64 of boxes of tensors, in row-major order, whatever the strides.

A checksum does not depend on how a box is cut on its way, so the two sides may read and write it in
different parts. Parts are small enough to be hashed while the processor's cache still holds them.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import xxhash
from torch import Tensor

from cosmos_weightsync.boxes import Box
from cosmos_weightsync.byte_rows import byte_rows, flat_bytes, lent_bytes
from cosmos_weightsync.streaming import SHORTEST_COMPILED, RowMove, compiled_rows, row_engine

__all__ = [
    "BLOCK_BYTES",
    "RunningChecksum",
    "box_blocks",
    "bytes_checksum",
    "combined_digest",
    "tensor_checksum",
]

BLOCK_BYTES = 1 << 20
"""Copying and hashing alternate in blocks of this size; a core's second-level cache holds two."""


class RunningChecksum:
    """A checksum that is carried on over the parts of a box.

    Args:
        num_bytes: How many there will be, where that is known: of enough of them, the compiled
            library can take care.

    Attributes:
        compiled: The library's state of it; ``None`` if the library does not take care.
    """

    def __init__(self, num_bytes: int = 0) -> None:
        self._engine = compiled_rows() if num_bytes >= SHORTEST_COMPILED else None
        self.compiled = None if self._engine is None else self._engine.start()
        self._state = xxhash.xxh3_64()

    def add(self, content: Tensor) -> None:
        """Carry on over a contiguous tensor."""
        self.add_bytes(lent_bytes(flat_bytes(content).cpu()))

    def add_bytes(self, content: np.ndarray) -> None:
        """Carry on over contiguous bytes."""
        if self._engine is None:
            self._state.update(content.data)
        else:
            self._engine.add(self.compiled, content)

    @property
    def value(self) -> int:
        """The checksum of everything so far."""
        if self._engine is None:
            return self._state.intdigest()
        return self._engine.value(self.compiled)


def box_blocks(
    shape: Sequence[int], item_bytes: int, block_bytes: int = BLOCK_BYTES
) -> list[tuple[slice, ...]]:
    """Slices that cut a tensor of this shape into blocks, in row-major order.

    Args:
        shape: Of the tensor.
        item_bytes: Of an element.
        block_bytes: The largest block.
    """
    whole = Box.full(shape)
    size = max(1, block_bytes // item_bytes)
    return [part.relative_to(whole) for part in whole.split(size)]


def bytes_checksum(content: np.ndarray) -> int:
    """The checksum of contiguous bytes."""
    return xxhash.xxh3_64_intdigest(content.data)


def tensor_checksum(tensor: Tensor) -> int:
    """The checksum of a tensor's elements in row-major order; strides are free."""
    source = tensor.detach()
    if source.is_contiguous():
        return bytes_checksum(lent_bytes(flat_bytes(source).cpu()))
    rows = byte_rows(source)
    if rows is not None:
        return row_engine().prepare([RowMove(rows, None)]).make()[0]
    running = RunningChecksum()
    room = source.new_empty(min(source.numel(), max(1, BLOCK_BYTES // source.element_size())))
    for block in box_blocks(source.shape, source.element_size()):
        part = source[block]
        running.add(room[: part.numel()].view(part.shape).copy_(part))
    return running.value


def combined_digest(sums: Mapping[int, Sequence[int]]) -> str:
    """One digest over the checksums of all pieces, in order, by the number of the source."""
    state = xxhash.xxh3_64()
    for source, values in sorted(sums.items()):
        state.update(np.array([source, len(values), *values], dtype="<u8").data)
    return state.hexdigest()
