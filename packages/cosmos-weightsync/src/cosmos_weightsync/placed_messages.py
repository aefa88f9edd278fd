"""The messages of an edge over the memory that its pieces lie in.

Where a message is to be packed or unpacked is worked out once; then it is one call of the compiled
library, which hashes what it unpacks. Without the library, on a GPU, or for memory that falls into
no rows, the chunks are copied one by one.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from cosmos_weightsync.byte_rows import flat_bytes
from cosmos_weightsync.checksums import RunningChecksum, bytes_checksum, tensor_checksum
from cosmos_weightsync.chunks import (
    HeldBoxes,
    Message,
    message_parts,
    message_rows,
    pack,
    unpack,
)
from cosmos_weightsync.planning import Piece
from cosmos_weightsync.streaming import CompiledMoves, CompiledRows, RowMove, compiled_rows

__all__ = ["PieceSums", "PlacedMessage"]


class PieceSums:
    """The checksums of pieces that arrive whole, or part by part in order."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self._pieces = pieces
        self._values = [0] * len(pieces)
        self._running: dict[int, RunningChecksum] = {}

    def is_whole(self, number: int, num_bytes: int) -> bool:
        """Whether so many bytes are all of a piece."""
        return self._pieces[number].num_bytes == num_bytes

    def know(self, number: int, value: int) -> None:
        """The checksum of a piece that arrived whole."""
        self._values[number] = value

    def running(self, number: int) -> RunningChecksum:
        """To be carried on over the parts of a piece."""
        if number not in self._running:
            self._running[number] = RunningChecksum(self._pieces[number].num_bytes)
        return self._running[number]

    def values(self) -> list[int]:
        """Of all pieces, once everything has arrived."""
        for number, running in self._running.items():
            self._values[number] = running.value
        return self._values


class PlacedMessage:
    """One message. Used by one thread at a time.

    Args:
        message: What it carries.
        held: Where that lies; looked at now.
        device: Of the channel.

    Attributes:
        rows: The memory of a message of one piece that falls into rows of bytes.
        raw: The same where these bytes follow one another.
        flat: The memory of a message of one piece that needs no packing.
    """

    def __init__(self, message: Message, held: HeldBoxes, device: torch.device) -> None:
        self.message = message
        self._regions = [(chunk.name, chunk.box) for chunk in message.chunks]
        self._num_bytes = sum(chunk.num_bytes for chunk in message.chunks)
        first = message.chunks[0]
        self.rows = message_rows(message, held)
        self.raw = self.flat = None
        if len(message.chunks) == 1:
            self.raw = held.raw(first.name, first.box)
            is_whole = held.is_whole(first.name, first.box)
            view = held.view(first.name, first.box) if is_whole else None
            if view is not None and view.is_contiguous() and view.device == device:
                self.flat = flat_bytes(view)
        self._packing: CompiledMoves | None = None
        self._unpacking: CompiledMoves | None = None

    def pack(self, held: HeldBoxes, bucket: Tensor) -> Tensor:
        """Copy the chunks into a bucket; returns the part of the bucket that is the message."""
        compiled = compiled_rows()
        if compiled is None or bucket.device.type != "cpu" or held.is_arriving:
            return pack(self.message, held, bucket)
        if self._packing is None:
            self._packing = self._prepared_packing(compiled, held, bucket)
            if self._packing is None:
                return pack(self.message, held, bucket)
        self._packing.make_in(bucket.data_ptr())
        return bucket[: self.message.num_bytes]

    def tell(self, held: HeldBoxes) -> bool:
        """Its bytes lie in place; returns whether somebody waits for what arrives."""
        return held.arrived(self._regions, self._num_bytes)

    def end(self, held: HeldBoxes, content: Tensor, sums: PieceSums) -> None:
        """The message is there: hash it, and take it out of its bucket if it is in one."""
        if self.flat is not None:
            self._hash(sums)
            return
        compiled = compiled_rows()
        if compiled is not None and content.device.type == "cpu" and self._unpacking is None:
            self._unpacking = self._prepared_unpacking(compiled, held, content, sums)
        for chunk, part in message_parts(self.message, content):
            if self._unpacking is None or not sums.is_whole(chunk.piece, chunk.num_bytes):
                sums.running(chunk.piece).add(part)
        if self._unpacking is None:
            unpack(self.message, held, content)
            return
        values = self._unpacking.make_in(content.data_ptr())
        for chunk, value in zip(self.message.chunks, values, strict=True):
            if sums.is_whole(chunk.piece, chunk.num_bytes):
                sums.know(chunk.piece, value)

    def _hash(self, sums: PieceSums) -> None:
        assert self.flat is not None
        (chunk,) = self.message.chunks
        is_whole = sums.is_whole(chunk.piece, chunk.num_bytes)
        if is_whole and self.raw is not None:
            sums.know(chunk.piece, bytes_checksum(self.raw))
        elif is_whole:
            sums.know(chunk.piece, tensor_checksum(self.flat))
        elif self.raw is not None:
            sums.running(chunk.piece).add_bytes(self.raw)
        else:
            sums.running(chunk.piece).add(self.flat)

    def _prepared_packing(
        self, compiled: CompiledRows, held: HeldBoxes, bucket: Tensor
    ) -> CompiledMoves | None:
        moves: list[RowMove] = []
        for chunk, part in message_parts(self.message, bucket):
            rows = held.rows(chunk.name, chunk.box)
            if rows is None:
                return None
            moves.append(RowMove(rows, part.numpy().reshape(rows.shape), is_hashed=False))
        return compiled.prepare(moves).in_bucket("to", bucket.data_ptr())

    def _prepared_unpacking(
        self, compiled: CompiledRows, held: HeldBoxes, content: Tensor, sums: PieceSums
    ) -> CompiledMoves | None:
        moves: list[RowMove] = []
        for chunk, part in message_parts(self.message, content):
            rows = held.rows(chunk.name, chunk.box)
            if rows is None:
                return None
            is_hashed = sums.is_whole(chunk.piece, chunk.num_bytes)
            moves.append(RowMove(part.numpy().reshape(rows.shape), rows, is_hashed))
        return compiled.prepare(moves).in_bucket("source", content.data_ptr())
