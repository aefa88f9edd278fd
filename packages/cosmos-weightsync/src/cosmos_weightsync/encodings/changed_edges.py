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
"""

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import xxhash
from torch import Tensor

from cosmos_weightsync.boxes import Box
from cosmos_weightsync.byte_rows import flat_bytes, lent_bytes
from cosmos_weightsync.chunks import HeldBoxes, piece_checksum
from cosmos_weightsync.deadlines import Deadline
from cosmos_weightsync.encodings.changes import ChangeDecoder, ChangeEncoder, Dense, Sparse
from cosmos_weightsync.errors import BaseVersionError, DigestError, ProtocolError
from cosmos_weightsync.planning import Piece
from cosmos_weightsync.transports import Channel

__all__ = ["MovedEdge", "check_base", "pull_changes", "serve_changes"]

_FRAME = struct.Struct("<IIQQ")
_MAGIC = 0x43574431
_CHUNK_BYTES = 1 << 20
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class MovedEdge:
    """How an edge went.

    Attributes:
        checksums: Of every piece of the new version.
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


def serve_changes(
    channel: Channel,
    pieces: Sequence[Piece],
    held: HeldBoxes,
    base: HeldBoxes,
    deadline: Deadline,
    *,
    bucket_bytes: int,
) -> MovedEdge:
    """Send what changed between two versions; neither may change until this returns.

    Args:
        channel: The holder's end.
        pieces: Of this edge, in order.
        held: The new version.
        base: The version that the receiver has.
        deadline: When to give up.
        bucket_bytes: What both ends agreed on; a frame is not longer.

    Raises:
        TransferError: the receiver is gone or too slow; the channel is of no use afterwards.
    """
    encoder = ChangeEncoder()
    parts: list[bytes | Bytes] = []
    num_chunks = filled = num_bytes = 0

    for piece, box, item_bytes in _chunks(pieces, bucket_bytes):
        new, before = _bytes_of(held, piece.name, box), _bytes_of(base, piece.name, box)
        record = encoder.encode(new, before, item_bytes)
        size = sum(len(part) for part in record)
        if parts and filled + size > bucket_bytes:
            num_bytes += _send_frame(channel, parts, num_chunks, deadline)
            parts, num_chunks, filled = [], 0, 0
        parts += record
        num_chunks, filled = num_chunks + 1, filled + size
    if parts:
        num_bytes += _send_frame(channel, parts, num_chunks, deadline)
    return MovedEdge([piece_checksum(held, piece) for piece in pieces], num_bytes)


def pull_changes(
    channel: Channel,
    pieces: Sequence[Piece],
    held: HeldBoxes,
    deadline: Deadline,
    *,
    bucket_bytes: int,
) -> MovedEdge:
    """Turn the version in ``held`` into the new one; the mirror image of `serve_changes`.

    Raises:
        DigestError: a frame is not what was sent. Parts of ``held`` are new, the others old.
        ProtocolError: a frame does not describe changes of these pieces.
        TransferError: the holder is gone or too slow; the channel is of no use afterwards.
    """
    decoder = ChangeDecoder()
    stream, offset, left, num_bytes = np.empty(0, np.uint8), 0, 0, 0
    for piece, box, item_bytes in _chunks(pieces, bucket_bytes):
        if left == 0:
            where = f"{piece.name} {box}"
            stream, left = _receive_frame(channel, where, bucket_bytes, deadline)
            offset, num_bytes = 0, num_bytes + _FRAME.size + len(stream)
        change, offset = decoder.decode(stream, offset, box.numel, item_bytes)
        left -= 1
        if isinstance(change, Sparse | Dense):
            _apply(change, held.view(piece.name, box))
        held.arrived([(piece.name, box)], box.numel * item_bytes)
    return MovedEdge([piece_checksum(held, piece) for piece in pieces], num_bytes)


def _chunks(pieces: Sequence[Piece], bucket_bytes: int) -> Iterator[tuple[Piece, Box, int]]:
    """The runs of elements that records stand for, and bytes per element; alike on both sides."""
    chunk_bytes = min(_CHUNK_BYTES, bucket_bytes // 2)
    for piece in pieces:
        item_bytes = piece.num_bytes // piece.box.numel
        for box in piece.box.split(max(1, chunk_bytes // item_bytes)):
            yield piece, box, item_bytes


def _bytes_of(held: HeldBoxes, name: str, box: Box) -> Bytes:
    return lent_bytes(flat_bytes(held.view(name, box).contiguous()).cpu())


def _send_frame(
    channel: Channel, parts: Sequence[bytes | Bytes], num_chunks: int, deadline: Deadline
) -> int:
    payload = np.concatenate([np.frombuffer(part, np.uint8) for part in parts])
    head = _FRAME.pack(_MAGIC, num_chunks, len(payload), xxhash.xxh3_64_intdigest(payload.data))
    channel.send(_on(channel, np.frombuffer(bytearray(head), np.uint8)), deadline)
    channel.send(_on(channel, payload), deadline)
    return len(head) + len(payload)


def _receive_frame(
    channel: Channel, where: str, bucket_bytes: int, deadline: Deadline
) -> tuple[Bytes, int]:
    """A frame that begins with the chunk at ``where``, and how many chunks it has."""
    head = torch.empty(_FRAME.size, dtype=torch.uint8, device=channel.device)
    channel.recv_into(head, deadline)
    magic, num_chunks, num_bytes, checksum = _FRAME.unpack(head.cpu().numpy().tobytes())
    # A chunk that is sent as it is takes half of the bucket, and its header.
    if magic != _MAGIC or num_chunks < 1 or not 0 < num_bytes <= max(bucket_bytes, 1 << 12):
        raise ProtocolError(f"{where}: a frame of changes was due, not one of {num_bytes} bytes")
    payload = torch.empty(num_bytes, dtype=torch.uint8, device=channel.device)
    channel.recv_into(payload, deadline)
    stream = payload.cpu().numpy()
    found = xxhash.xxh3_64_intdigest(stream.data)
    if found != checksum:
        raise DigestError(
            f"{where}: a frame of changes was sent with checksum {checksum:016x}, "
            f"{found:016x} arrived"
        )
    return stream, num_chunks


def _on(channel: Channel, content: Bytes) -> Tensor:
    return torch.from_numpy(content).to(channel.device)


def _apply(change: Sparse | Dense, view: Tensor) -> None:
    """Overwrite what changed."""
    integer = _INTEGERS[view.element_size()]
    whole = view.contiguous()  # The same memory where it can be.
    flat = whole.view(-1).view(integer)
    if isinstance(change, Dense):
        flat.copy_(_elements(change.content, integer))
    else:
        where = torch.from_numpy(change.positions).to(view.device)
        flat[where] = _elements(change.values, integer).to(view.device)
    if whole.data_ptr() != view.data_ptr():
        view.copy_(whole)


def _elements(content: Bytes, integer: torch.dtype) -> Tensor:
    """Bytes at any offset as elements."""
    return torch.from_numpy(content.copy()).view(integer)
