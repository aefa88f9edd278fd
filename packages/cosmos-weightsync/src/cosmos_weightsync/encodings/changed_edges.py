"""Moving an edge as what changed since a version that both ends have.

Takes the place of `cosmos_weightsync.edges` for one version: the holder compares two of its
versions piece by piece, the receiver overwrites its copy of the older one in place.

```
base version ─┐
              ├─► records of chunks ─► frames ═► records ─► the receiver's copy, now the new version
new version ──┘                         │
                     magic, chunks, bytes, xxh3 | zstd
```
Both ends know the chunks from the pieces, so a record carries no name. A frame is as long as what
changed, so its length goes first, as a message of its own.

A frame is written and read in a part of the bucket that its edge borrows for it, as messages of
whole pieces are. What comparing and applying take besides is counted in the part:

```
head │ payload: two chunks as they are, or records of more │ arrays of one chunk at work
```
"""

import struct
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import xxhash
from torch import Tensor

from cosmos_weightsync.arenas import ALIGNMENT
from cosmos_weightsync.boxes import Box
from cosmos_weightsync.buckets import half_of
from cosmos_weightsync.byte_rows import flat_bytes, lent_bytes
from cosmos_weightsync.chunks import HeldBoxes, piece_checksum
from cosmos_weightsync.deadlines import Deadline
from cosmos_weightsync.edge_ends import EdgeEnd
from cosmos_weightsync.encodings.changes import (
    RECORD_HEAD_BYTES,
    WORK_PER_BYTE,
    ChangeDecoder,
    ChangeEncoder,
    Dense,
    Sparse,
)
from cosmos_weightsync.errors import BaseVersionError, DigestError, ProtocolError
from cosmos_weightsync.planning import Piece

__all__ = ["FrameSizes", "MovedEdge", "check_base", "pull_changes", "serve_changes"]

_FRAME = struct.Struct("<IIQQ")
_MAGIC = 0x43574431
_MOST_PART_BYTES = 4 << 20
"""Of the bucket, for one frame: larger ones are no faster, and keep others waiting."""
_MOST_CHUNKS = 160
"""In a frame, so that whoever waits for it does not wait long where little has changed."""
_HOST = torch.device("cpu")
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

Bytes = npt.NDArray[np.uint8]
ChunkBox = tuple[Piece, Box, int]
"""A run of elements that a record stands for: of which piece, where, and bytes per element."""


@dataclass(frozen=True, slots=True)
class FrameSizes:
    """How the part of a bucket that one frame takes is divided; alike on both sides.

    Attributes:
        part: All of it, in bytes.
        chunk: The longest run of elements that a record stands for.
        payload: The longest payload.
    """

    part: int
    chunk: int
    payload: int

    @classmethod
    def of(cls, bucket_bytes: int) -> "FrameSizes":
        """For what both ends agreed on: two parts fit into it."""
        part = min(half_of(bucket_bytes), _MOST_PART_BYTES)
        room = part - ALIGNMENT - RECORD_HEAD_BYTES
        chunk = room // (WORK_PER_BYTE + 2) // 8 * 8  # words are compared
        return cls(part, chunk, part - ALIGNMENT - chunk * WORK_PER_BYTE)


@dataclass(frozen=True, slots=True)
class MovedEdge:
    """What a receiver has of an edge.

    Attributes:
        checksums: Of every piece of the new version, as it lies here now.
        num_bytes: What crossed the channel.
    """

    checksums: list[int]
    num_bytes: int


def check_base(
    pieces: Sequence[Piece], ours: Sequence[int], theirs: Sequence[int], version: int, holder: str
) -> None:
    """Hold what a receiver says it has of a version against what the holder has of it.

    Raises:
        BaseVersionError: they differ; it names the first tensor and region that does.
    """
    if len(theirs) != len(pieces):
        raise BaseVersionError(
            f"{holder}: version {version} has {len(pieces)} pieces for this receiver, which "
            f"describes {len(theirs)}"
        )
    for piece, expected, found in zip(pieces, ours, theirs, strict=True):
        if expected != found:
            raise BaseVersionError(
                f"{piece.name} {piece.box}: the receiver's version {version} is not that of "
                f"{holder}; its checksum is {found:016x}, not {expected:016x}"
            )


def serve_changes(end: EdgeEnd, held: HeldBoxes, base: HeldBoxes, deadline: Deadline) -> None:
    """Send what changed between two versions; neither may change until this returns.

    Args:
        end: The holder's end, with the pieces to tell of.
        held: The new version.
        base: The version that the receiver has.
        deadline: When to give up.

    Raises:
        TransferError: the receiver is gone or too slow; the channel is of no use afterwards.
    """
    encoder, sizes = ChangeEncoder(), FrameSizes.of(end.bucket_bytes)
    chunks = _chunks(end.pieces, sizes.chunk)
    chunk = next(chunks, None)
    while chunk is not None:
        with _frame(end, sizes, deadline) as place:
            on_host, on_wire = place.on_host, place.on_wire
            payload = lent_bytes(on_host[ALIGNMENT:])
            rooms, filled, num_chunks = place.rooms, 0, 0
            while chunk is not None and num_chunks < _MOST_CHUNKS:
                if filled + RECORD_HEAD_BYTES + sizes.chunk > len(payload):
                    break
                new, before = _bytes_of(held, chunk, rooms[0]), _bytes_of(base, chunk, rooms[1])
                for part in encoder.encode(new, before, chunk[2]):
                    payload[filled : filled + len(part)] = np.frombuffer(part, np.uint8)
                    filled += len(part)
                num_chunks, chunk = num_chunks + 1, next(chunks, None)
            _write_head(on_host, num_chunks, payload[:filled])
            used = ALIGNMENT + filled
            if on_wire is not on_host:
                on_wire[:used].copy_(on_host[:used])
            end.channel.send(on_wire[: _FRAME.size], deadline)
            end.channel.send(on_wire[ALIGNMENT:used], deadline)


def pull_changes(end: EdgeEnd, held: HeldBoxes, deadline: Deadline) -> MovedEdge:
    """Turn the version in ``held`` into the new one; the mirror image of `serve_changes`.

    Returns:
        What is to be held against the holder's checksums: frames are checked, their making is not.

    Raises:
        DigestError: a frame is not what was sent. Parts of ``held`` are new, the others old.
        ProtocolError: a frame does not describe changes of these pieces.
        TransferError: the holder is gone or too slow; the channel is of no use afterwards.
    """
    decoder, sizes, num_bytes = ChangeDecoder(), FrameSizes.of(end.bucket_bytes), 0
    chunks = _chunks(end.pieces, sizes.chunk)
    chunk = next(chunks, None)
    while chunk is not None:
        with _frame(end, sizes, deadline) as place:
            where = f"{chunk[0].name} {chunk[1]}"
            stream, left = _receive_frame(end, place, where, deadline)
            offset = 0
            while chunk is not None and left:
                piece, box, item_bytes = chunk
                change, offset = decoder.decode(stream, offset, box.numel, item_bytes)
                if isinstance(change, Sparse | Dense):
                    _apply(change, _view_of(held, chunk), place.rooms[0])
                held.arrived([(piece.name, box)], box.numel * item_bytes)
                left, chunk = left - 1, next(chunks, None)
            if left or offset != len(stream):
                raise ProtocolError(f"{where}: a frame of changes has more than was due")
            num_bytes += _FRAME.size + len(stream)
    return MovedEdge([piece_checksum(held, piece) for piece in end.pieces], num_bytes)


def _chunks(pieces: Sequence[Piece], chunk_bytes: int) -> Iterator[ChunkBox]:
    """The runs of elements that records stand for; alike on both sides."""
    for piece in pieces:
        item_bytes = piece.num_bytes // piece.box.numel
        for box in piece.box.split(max(1, chunk_bytes // item_bytes)):
            yield piece, box, item_bytes


def _view_of(held: HeldBoxes, chunk: ChunkBox) -> Tensor:
    """Of its piece's, which is kept: there are too many of chunks."""
    piece, box, _ = chunk
    return held.view(piece.name, piece.box)[box.relative_to(piece.box)]


def _bytes_of(held: HeldBoxes, chunk: ChunkBox, room: Tensor) -> Bytes:
    """Where they lie if they lie so on the host, else copied there.

    A block that is allocated for each chunk would cost several: the C library does not find
    aligned blocks again that were freed (glibc before 2.38).
    """
    piece, box, _ = chunk
    if not held.is_whole(piece.name, piece.box):
        return lent_bytes(flat_bytes(held.copied(piece.name, box, room)))
    view = _view_of(held, chunk)
    if view.device.type != _HOST.type or not view.is_contiguous():
        view = _room_for(view, room).copy_(view)
    return lent_bytes(flat_bytes(view))


@dataclass(frozen=True, slots=True)
class _FramePlace:
    """Parts of the bucket for one frame.

    Attributes:
        on_host: For head and payload.
        on_wire: The same, where the channel takes it; the same memory if that is the host's.
        rooms: For a chunk of either version, on the host.
    """

    on_host: Tensor
    on_wire: Tensor
    rooms: tuple[Tensor, Tensor]


@contextmanager
def _frame(end: EdgeEnd, sizes: FrameSizes, deadline: Deadline) -> Generator[_FramePlace]:
    size, device = ALIGNMENT + sizes.payload, end.channel.device
    with end.buckets.borrow() as host, end.buckets.borrow() as wire:
        part = host.take(sizes.part, _HOST, deadline).view
        is_host = device.type == _HOST.type
        on_wire = part[:size] if is_host else wire.take(size, device, deadline).view
        first, second = part[size:][: 2 * sizes.chunk].split(sizes.chunk)
        yield _FramePlace(part[:size], on_wire, (first, second))


def _write_head(on_host: Tensor, num_chunks: int, payload: Bytes) -> None:
    head = _FRAME.pack(_MAGIC, num_chunks, len(payload), xxhash.xxh3_64_intdigest(payload.data))
    lent_bytes(on_host)[: _FRAME.size] = np.frombuffer(head, np.uint8)


def _receive_frame(
    end: EdgeEnd, place: _FramePlace, where: str, deadline: Deadline
) -> tuple[Bytes, int]:
    """A frame that begins with the chunk at ``where``, and how many chunks it has."""
    on_host, on_wire = place.on_host, place.on_wire
    end.channel.recv_into(on_wire[: _FRAME.size], deadline)
    head = on_wire[: _FRAME.size].cpu().numpy().tobytes()
    magic, num_chunks, num_bytes, checksum = _FRAME.unpack(head)
    most = len(on_wire) - ALIGNMENT
    if magic != _MAGIC or num_chunks < 1 or not 0 < num_bytes <= most:
        raise ProtocolError(f"{where}: a frame of changes was due, not one of {num_bytes} bytes")
    payload = on_wire[ALIGNMENT : ALIGNMENT + num_bytes]
    end.channel.recv_into(payload, deadline)
    if on_wire is not on_host:
        payload = on_host[ALIGNMENT : ALIGNMENT + num_bytes].copy_(payload)
    stream = lent_bytes(payload)
    found = xxhash.xxh3_64_intdigest(stream.data)
    if found != checksum:
        raise DigestError(
            f"{where}: a frame of changes was sent with checksum {checksum:016x}, "
            f"{found:016x} arrived"
        )
    return stream, num_chunks


def _apply(change: Sparse | Dense, view: Tensor, room: Tensor) -> None:
    """Overwrite what changed; strided elements are put next to each other in ``room`` for it."""
    integer = _INTEGERS[view.element_size()]
    whole = view
    if not view.is_contiguous():
        is_host = view.device.type == _HOST.type
        whole = _room_for(view, room).copy_(view) if is_host else view.contiguous()
    flat = whole.view(-1).view(integer)
    if isinstance(change, Dense):
        flat.copy_(_elements(change.content, integer))
    else:
        # torch would widen them itself, into an aligned block of its own (see `_bytes_of`).
        where = torch.from_numpy(change.positions.astype(np.int64)).to(view.device)
        flat[where] = _elements(change.values, integer).to(view.device)
    if whole is not view:
        view.copy_(whole)


def _room_for(view: Tensor, room: Tensor) -> Tensor:
    return room[: view.nbytes].view(view.dtype).view(view.shape)


def _elements(content: Bytes, integer: torch.dtype) -> Tensor:
    """Bytes at any offset as elements."""
    return torch.from_numpy(content.copy()).view(integer)
