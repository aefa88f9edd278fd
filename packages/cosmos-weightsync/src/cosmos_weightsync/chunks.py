"""How the pieces of one edge travel: cut and packed into messages, the same on both sides.

A piece of a certain size on travels in messages of its own, straight from and into place where the
memory is contiguous; smaller ones share a bucket. Which size is the transport's policy. Both sides
derive the messages from the plan, so nothing but the bytes is sent.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from cosmos_weightsync.arenas import ALIGNMENT, Arena
from cosmos_weightsync.boxes import Box
from cosmos_weightsync.byte_rows import byte_rows
from cosmos_weightsync.checksums import (
    BLOCK_BYTES,
    RunningChecksum,
    combined_digest,
    tensor_checksum,
)
from cosmos_weightsync.errors import LayoutError
from cosmos_weightsync.planning import Piece
from cosmos_weightsync.version_checksums import VersionChecksums
from cosmos_weightsync.wide_views import copy_wide

__all__ = [
    "Chunk",
    "HeldBoxes",
    "Message",
    "message_parts",
    "message_rows",
    "pack",
    "piece_checksum",
    "schedule",
    "unpack",
    "version_digest",
]

DIRECT_BYTES = 256 << 10


@dataclass(frozen=True, slots=True)
class Chunk:
    """A part of piece number ``piece`` of the edge, at ``offset`` in its message."""

    piece: int
    name: str
    box: Box
    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Message:
    """What one send carries. ``num_bytes`` counts the padding between chunks."""

    chunks: tuple[Chunk, ...]
    num_bytes: int

    def await_views(self, held: "HeldBoxes") -> None:
        """Wait until all of it is there to be sent."""
        for chunk in self.chunks:
            held.view(chunk.name, chunk.box)


def schedule(
    pieces: Sequence[Piece], bucket_bytes: int, direct_bytes: int = DIRECT_BYTES
) -> Iterator[Message]:
    """Cut and pack the pieces of one edge, in order, into messages of at most ``bucket_bytes``.

    Parts of at least ``direct_bytes`` travel alone.
    """
    waiting: list[Chunk] = []
    filled = 0
    for index, piece in enumerate(pieces):
        item_bytes = piece.num_bytes // piece.box.numel
        for box in piece.box.split(max(1, bucket_bytes // item_bytes)):
            num_bytes = box.numel * item_bytes
            if num_bytes >= min(direct_bytes, bucket_bytes):
                if waiting and waiting[-1].piece == index:  # A piece travels in order.
                    yield Message(tuple(waiting), filled)
                    waiting, filled = [], 0
                yield Message((Chunk(index, piece.name, box, 0, num_bytes),), num_bytes)
                continue
            start = -(-filled // ALIGNMENT) * ALIGNMENT
            if start + num_bytes > bucket_bytes and waiting:
                yield Message(tuple(waiting), filled)
                waiting, start = [], 0
            waiting.append(Chunk(index, piece.name, box, start, num_bytes))
            filled = start + num_bytes
    if waiting:
        yield Message(tuple(waiting), filled)


class HeldBoxes:
    """Tensors by name and box, from which any box inside one of them can be viewed.

    Views are kept: what is asked for in one version is asked for in the next. A box that several
    tensors have parts of, which do not overlap, can be copied.

    Args:
        held: (name, box, tensor) of each.
        arena: Where all of them lie, if in one.
        checksums: Of the version they hold, if somebody keeps them.
        on_view: Called with name and box before a view is given away; it may wait or refuse.
        on_arrival: Called with regions once new bytes lie in place, and how many; from any thread.
            Returns whether somebody waits for what arrives, to pass it on.
    """

    def __init__(
        self,
        held: Iterable[tuple[str, Box, Tensor]],
        *,
        arena: Arena | None = None,
        checksums: VersionChecksums | None = None,
        on_view: Callable[[str, Box], None] | None = None,
        on_arrival: Callable[[Sequence[tuple[str, Box]], int], bool] | None = None,
    ) -> None:
        self.arena = arena
        self.checksums = checksums
        self._on_view = on_view
        self._on_arrival = on_arrival
        self._held: dict[str, list[tuple[Box, Tensor]]] = {}
        self._views: dict[tuple[str, Box], Tensor] = {}
        self._rows: dict[tuple[str, Box], np.ndarray | None] = {}
        self._raws: dict[tuple[str, Box], np.ndarray | None] = {}
        for name, box, tensor in held:
            self._held.setdefault(name, []).append((box, tensor))

    def is_whole(self, name: str, box: Box) -> bool:
        """Whether this box lies inside one of the tensors, so that it can be viewed."""
        return any(origin.contains(box) for origin, _ in self._held.get(name, ()))

    def view(self, name: str, box: Box) -> Tensor:
        """The memory of this box.

        Raises:
            LayoutError: it lies inside none of the tensors.
        """
        view = self._views.get((name, box))
        if view is None:
            view = self._views[name, box] = self._make(name, box)
        if self._on_view is not None:
            self._on_view(name, box)
        return view

    def raw(self, name: str, box: Box) -> np.ndarray | None:
        """The bytes of this box, if they follow one another in host memory; see `view`.

        Returns:
            The same array each time.
        """
        rows = self.rows(name, box)
        if (name, box) not in self._raws:
            raw = None if rows is None or rows.shape[1] != 1 else rows.reshape(-1)
            self._raws[name, box] = raw
        return self._raws[name, box]

    def rows(self, name: str, box: Box) -> np.ndarray | None:
        """The bytes of this box as rows in host memory, if it falls into any; see `view`."""
        if (name, box) not in self._rows and not self.is_whole(name, box):
            return None
        view = self.view(name, box)
        if (name, box) not in self._rows:
            self._rows[name, box] = byte_rows(view)
        return self._rows[name, box]

    def copied(self, name: str, box: Box, room: Tensor) -> Tensor:
        """A copy of this box, wherever the tensors have its parts.

        Args:
            name: Of the tensor.
            box: Of it.
            room: ``uint8[n]`` at least as long as the box, aligned for its dtype.

        Returns:
            The part of ``room`` that is the box, in its shape and dtype.

        Raises:
            LayoutError: not all of it is held here.
        """
        dtype = self._dtype_of(name, box)
        found = room[: box.numel * dtype.itemsize].view(dtype).view(box.shape)
        left = box.numel
        for origin, tensor in self._held[name]:
            part = origin.intersect(box)
            if part is not None:
                found[part.relative_to(box)].copy_(tensor[part.relative_to(origin)])
                left -= part.numel
        if left:
            raise LayoutError(f"{name}: {box} is not held here")
        return found

    def checksum(self, name: str, box: Box) -> int:
        """The checksum of this box as it lies in memory now, in row-major order."""
        if self.is_whole(name, box):
            return tensor_checksum(self.view(name, box))
        room = torch.empty(BLOCK_BYTES, dtype=torch.uint8)
        item_bytes = self._dtype_of(name, box).itemsize
        running = RunningChecksum(box.numel * item_bytes)
        for part in box.split(BLOCK_BYTES // item_bytes):
            running.add(self.copied(name, part, room))
        return running.value

    def _dtype_of(self, name: str, box: Box) -> torch.dtype:
        for _, tensor in self._held.get(name, ()):
            return tensor.dtype
        raise LayoutError(f"{name}: {box} is not held here")

    def _make(self, name: str, box: Box) -> Tensor:
        for origin, tensor in self._held.get(name, ()):
            if origin.contains(box):
                return tensor[box.relative_to(origin)]
        raise LayoutError(f"{name}: {box} is not held here")

    @property
    def is_arriving(self) -> bool:
        """Whether a view may have to be waited for."""
        return self._on_view is not None

    def arrived(self, regions: Sequence[tuple[str, Box]], num_bytes: int) -> bool:
        """So many new bytes lie in these regions; whoever puts them there says so.

        Returns:
            Whether somebody waits for what arrives, to pass it on.
        """
        return self._on_arrival is not None and self._on_arrival(regions, num_bytes)


def message_rows(message: Message, held: HeldBoxes) -> np.ndarray | None:
    """The memory of a message as rows of bytes, if it is of one piece that falls into such."""
    if len(message.chunks) != 1:
        return None
    return held.rows(message.chunks[0].name, message.chunks[0].box)


def pack(message: Message, held: HeldBoxes, bucket: Tensor) -> Tensor:
    """Copy the chunks into the bucket; returns the part of the bucket that is the message."""
    for chunk, part in message_parts(message, bucket):
        if not held.is_whole(chunk.name, chunk.box):
            held.copied(chunk.name, chunk.box, part)
            continue
        view = held.view(chunk.name, chunk.box)
        rows = held.rows(chunk.name, chunk.box) if part.device.type == "cpu" else None
        if rows is not None and rows.shape[1] > 1:  # Rows with gaps: NumPy copies them faster.
            np.copyto(part.numpy().reshape(rows.shape), rows)
        else:
            _copy(view, part.view(view.dtype).view(view.shape))
    return bucket[: message.num_bytes]


def unpack(message: Message, held: HeldBoxes, bucket: Tensor) -> None:
    """Copy the chunks out of the bucket to where they belong."""
    for chunk, part in message_parts(message, bucket):
        view = held.view(chunk.name, chunk.box)
        _copy(part.view(view.dtype).view(view.shape), view)


def _copy(source: Tensor, target: Tensor) -> None:
    if source.device.type == "cuda":
        copy_wide(source, target)
    else:
        target.copy_(source)


def message_parts(message: Message, bucket: Tensor) -> Iterator[tuple[Chunk, Tensor]]:
    """The chunks of a message, and where each lies in the bucket."""
    for chunk in message.chunks:
        yield chunk, bucket[chunk.offset : chunk.offset + chunk.num_bytes]


def piece_checksum(held: HeldBoxes, piece: Piece) -> int:
    """The checksum of a piece as it lies in memory now, in row-major order."""
    return held.checksum(piece.name, piece.box)


version_digest = combined_digest
