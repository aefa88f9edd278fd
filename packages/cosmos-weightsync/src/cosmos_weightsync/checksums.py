"""xxh3_64 of boxes of tensors, in row-major order, whatever the strides.

A checksum does not depend on how a box is cut on its way, so the two sides may read and write it in
different parts. Parts are small enough to be hashed while the processor's cache still holds them.
"""

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
import torch
import xxhash
from torch import Tensor

from cosmos_weightsync.boxes import Box
from cosmos_weightsync.layout import ShardSpec
from cosmos_weightsync.planning import Piece
from cosmos_weightsync.streaming import SHORTEST_COMPILED, compiled_rows

__all__ = [
    "BLOCK_BYTES",
    "ChecksumCache",
    "RunningChecksum",
    "VersionChecksums",
    "box_blocks",
    "combined_digest",
    "flat_bytes",
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
        self.add_bytes(flat_bytes(content).cpu().numpy())

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


def flat_bytes(tensor: Tensor) -> Tensor:
    """The bytes of a contiguous tensor as a 1-dimensional uint8 view of the same memory."""
    return tensor.view(-1).view(torch.uint8)


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


def tensor_checksum(tensor: Tensor) -> int:
    """The checksum of a tensor's elements in row-major order; strides are free."""
    if tensor.is_contiguous():
        return xxhash.xxh3_64_intdigest(flat_bytes(tensor).cpu().numpy().data)
    running = RunningChecksum()
    for block in box_blocks(tensor.shape, tensor.element_size()):
        running.add(tensor[block].contiguous())
    return running.value


def combined_digest(sums: Mapping[tuple[int, int], int]) -> str:
    """One digest over the checksums of all pieces, by (source, number of the piece)."""
    text = ";".join(f"{source},{piece},{value}" for (source, piece), value in sorted(sums.items()))
    return xxhash.xxh3_64_hexdigest(text.encode())


class ChecksumCache:
    """Checksums of the boxes that somebody asks for, of versions that follow one another.

    What was asked for in one version is likely asked for in the next: `refresh` computes it when
    the version is written, while the bytes are in the cache and before anybody waits. A box that
    nobody asked for in two versions is forgotten. May be used from any thread.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._unused_for: dict[tuple[str, Box], int] = {}

    def start(self) -> "VersionChecksums":
        """The checksums of a version about to be written; nothing is known of it yet."""
        with self._lock:
            for key in list(self._unused_for):
                self._unused_for[key] += 1
                if self._unused_for[key] > _FORGOTTEN_AFTER:
                    del self._unused_for[key]
            expected = list(self._unused_for)
        return VersionChecksums(self._asked, expected)

    def _asked(self, keys: Iterable[tuple[str, Box]]) -> None:
        with self._lock:
            for key in keys:
                self._unused_for[key] = 0


_FORGOTTEN_AFTER = 2


class VersionChecksums:
    """The checksums of one version. May be used from any thread once the version is written.

    Attributes:
        expected: The boxes by tensor name that are likely to be asked for.
    """

    def __init__(
        self,
        asked: Callable[[Iterable[tuple[str, Box]]], None],
        expected: Sequence[tuple[str, Box]],
    ) -> None:
        self._asked = asked
        self._known: dict[tuple[str, Box], int] = {}
        self.expected: dict[str, list[Box]] = {}
        for name, box in expected:
            self.expected.setdefault(name, []).append(box)

    def expected_in(self, spec: ShardSpec) -> list[Box]:
        """What is likely to be asked for of this shard."""
        return [box for box in self.expected.get(spec.name, ()) if spec.box.contains(box)]

    def learn(self, name: str, sums: Mapping[Box, int]) -> None:
        """Checksums that were computed while the version was written."""
        self._known.update({(name, box): value for box, value in sums.items()})

    def of_pieces(self, pieces: Sequence[Piece], view: Callable[[str, Box], Tensor]) -> list[int]:
        """The checksums of these pieces; computes those that nobody asked for before."""
        keys = [(piece.name, piece.box) for piece in pieces]
        for key in keys:
            if key not in self._known:
                self._known[key] = tensor_checksum(view(*key))
        self._asked(keys)
        return [self._known[key] for key in keys]
