"""Moving the pieces of one edge, from a holder to a receiver, over one channel.

An edge is a source, a receiver and pieces in an order that both know from the plan. `serve_edge`
runs at the source and `pull_edge` at the receiver, at the same time; each returns the checksum of
every piece, and equal checksums are what makes a transfer good. Nothing but bytes crosses the
channel.

Over a one-sided channel the receiver copies out of the source's memory. Over a stream, pieces of
some size leave from the rows they lie in and are hashed as they arrive. Over the others the pieces
travel as messages, two packed ones in the bucket at a time: while one is on its way, the source
packs the next, and the receiver hashes and unpacks the one before. How many messages may be under
way is the transport's policy; a stream socket has its own window.

```
source    pack 0 │ pack 1 │ pack 2 │          halves of its bucket in turn
wire             │ send 0 │ send 1 │ send 2
receiver                  │ done 0 │ done 1 │ done 2
```
"""

import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from cosmos_weightsync.arenas import ALIGNMENT
from cosmos_weightsync.checksums import (
    RunningChecksum,
    box_blocks,
    tensor_checksum,
)
from cosmos_weightsync.chunks import (
    HeldBoxes,
)
from cosmos_weightsync.deadlines import Deadline
from cosmos_weightsync.edge_pieces import Batch, EdgePieces, EdgePlaces
from cosmos_weightsync.errors import DigestError
from cosmos_weightsync.placed_messages import PieceSums, PlacedMessage
from cosmos_weightsync.planning import Piece
from cosmos_weightsync.transports import (
    BatchedChannel,
    Channel,
    StreamChannel,
    Window,
    Windows,
    one_sided,
)

__all__ = ["BucketPool", "compare_checksums", "pull_edge", "serve_edge", "source_checksums"]


class BucketPool:
    """Staging memory for small and strided pieces, shared by the edges of one process.

    A bucket is allocated when a message first needs packing and is kept for the next edge, so
    there are never more buckets than edges at work at the same time. May be used from any thread.

    Args:
        bucket_bytes: The size of each; messages are at most half so long.
    """

    def __init__(self, bucket_bytes: int) -> None:
        self.bucket_bytes = bucket_bytes
        self._idle: dict[torch.device, list[Tensor]] = {}
        self._lock = threading.Lock()

    @contextmanager
    def borrow(self) -> "Generator[_Borrowed]":
        """A bucket for one edge, taken on first use and given back at the end."""
        borrowed = _Borrowed(self)
        try:
            yield borrowed
        finally:
            if borrowed.taken is not None:
                with self._lock:
                    self._idle.setdefault(borrowed.taken.device, []).append(borrowed.taken)

    def take(self, device: torch.device) -> Tensor:
        """An idle bucket, or a new one."""
        with self._lock:
            idle = self._idle.get(device)
            if idle:
                return idle.pop()
        return torch.empty(self.bucket_bytes, dtype=torch.uint8, device=device)


class _Borrowed:
    def __init__(self, pool: BucketPool) -> None:
        self._pool = pool
        self.half_bytes = half_of(pool.bucket_bytes)
        self.taken: Tensor | None = None

    def half(self, turn: int, num_bytes: int, device: torch.device) -> Tensor:
        """The first bytes of one of the two halves."""
        if self.taken is None:
            self.taken = self._pool.take(device)
        start = turn % 2 * self.half_bytes
        return self.taken[start : start + num_bytes]


def half_of(bucket_bytes: int) -> int:
    """The size of half a bucket, aligned for any dtype."""
    return bucket_bytes // (2 * ALIGNMENT) * ALIGNMENT


def serve_edge(
    channel: Channel,
    pieces: Sequence[Piece],
    held: HeldBoxes,
    buckets: BucketPool,
    deadline: Deadline,
    *,
    bucket_bytes: int,
) -> list[int]:
    """Send the pieces; the memory they lie in must not change until this returns.

    Args:
        channel: The source's end.
        pieces: Of this edge, in order.
        held: Where they are.
        buckets: Memory for pieces that must be packed.
        deadline: When to give up.
        bucket_bytes: What both ends agreed on; at most that of ``buckets``.

    Returns:
        The checksum of every piece.

    Raises:
        TransferError: the receiver is gone or too slow; the channel is of no use afterwards.
    """
    pieces = EdgePieces.of(pieces)
    if one_sided(channel):
        if held.is_arriving:  # Pass on what is there, rather than wait for the last piece.
            channel.decline(deadline)
        elif channel.expose(pieces.places(held).views, held.arena, deadline):
            sums = source_checksums(pieces, held)
            channel.await_finish(deadline)
            return sums
    with buckets.borrow() as bucket:
        _send(channel, pieces, held, bucket, bucket_bytes, deadline)
    return source_checksums(pieces, held)


class _UnderWay:
    """Messages that were begun and are not done: a few, and one at most in each half."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._waiting: deque[tuple[Callable[[], None], int | None]] = deque()

    def make_room(self, half: int | None) -> None:
        """End the oldest ones until there is room for another, in this half of the bucket."""
        while len(self._waiting) >= self._most or (
            half is not None and any(half == used for _, used in self._waiting)
        ):
            self._waiting.popleft()[0]()

    def add(self, end: Callable[[], None], half: int | None) -> None:
        """Another; ``end`` waits for it."""
        self._waiting.append((end, half))

    def drain(self) -> None:
        """End all."""
        while self._waiting:
            self._waiting.popleft()[0]()


def _send(
    channel: Channel,
    pieces: EdgePieces,
    held: HeldBoxes,
    bucket: _Borrowed,
    bucket_bytes: int,
    deadline: Deadline,
) -> None:
    under_way = _UnderWay(channel.capabilities.groups)
    batched = channel if isinstance(channel, BatchedChannel) else None
    stream = channel if isinstance(channel, StreamChannel) else None
    turn = 0
    for placed in _messages(channel, pieces, held, bucket_bytes):
        if stream is not None and placed.rows is not None:
            stream.send_rows(placed.rows, deadline)
            continue
        content = placed.flat
        half = None if content is not None else turn % 2
        under_way.make_room(half)
        if content is None:
            size = placed.message.num_bytes
            content = placed.pack(held, bucket.half(turn, size, channel.device))
            turn += 1
        if batched is not None:
            under_way.add(batched.begin_send(content, deadline), half)
        else:
            channel.send(content, deadline)
    under_way.drain()


def source_checksums(pieces: Sequence[Piece], held: HeldBoxes) -> list[int]:
    """What is known of the version already, or computed now."""
    if held.checksums is not None:
        return held.checksums.of_pieces(pieces, held.view)
    return [tensor_checksum(held.view(piece.name, piece.box)) for piece in pieces]


def _messages(
    channel: Channel, pieces: EdgePieces, held: HeldBoxes, bucket_bytes: int
) -> Iterable[PlacedMessage]:
    """The messages of the edge; two of them fit into a bucket."""
    policy, device = channel.capabilities, channel.device
    size = min(half_of(bucket_bytes), policy.message_bytes)
    messages = pieces.messages(size, policy.direct_bytes)
    if held.is_arriving:  # Each is looked at when its turn has come, and waited for.
        return (PlacedMessage(message, held, device) for message in messages)
    return pieces.places(held).messages(messages, held, device)


def pull_edge(
    channel: Channel,
    pieces: Sequence[Piece],
    held: HeldBoxes,
    buckets: BucketPool,
    deadline: Deadline,
    *,
    bucket_bytes: int,
) -> list[int]:
    """Receive the pieces into place; the mirror image of `serve_edge`.

    Returns:
        The checksum of every piece as it arrived, to be held against what the source returned.

    Raises:
        TransferError: the source is gone or too slow; the channel is of no use afterwards.
    """
    pieces = EdgePieces.of(pieces)
    with buckets.borrow() as bucket:
        if one_sided(channel):
            places = pieces.places(held)
            windows = channel.windows(places.shapes, deadline)
            if windows is not None:
                sums: list[int] = []
                for batch in places.batches(windows, half_of(bucket_bytes)):
                    deadline.remaining("the rest of the pieces")
                    sums += _read(channel, windows, batch, places, bucket)
                    held.arrived(pieces.regions[batch.first : batch.stop], batch.num_bytes)
                channel.finish(deadline)
                return sums
        return _receive(channel, pieces, held, bucket, bucket_bytes, deadline)


def _read(
    channel: Channel, windows: Windows, batch: Batch, places: EdgePlaces, bucket: _Borrowed
) -> list[int]:
    """Copy and hash pieces: in one go where both ends are rows of bytes, as they mostly are."""
    if batch.take is not None:
        return batch.take()
    numbers = range(batch.first, batch.stop)
    return [_read_boxes(channel, windows[n], places.views[n], bucket) for n in numbers]


def _read_boxes(channel: Channel, window: Window, view: Tensor, bucket: _Borrowed) -> int:
    """Any strides and devices, block by block, each hashed while the cache holds it."""
    running = RunningChecksum()
    size = min(channel.capabilities.read_bytes, bucket.half_bytes)
    for block in box_blocks(view.shape, view.element_size(), size):
        target = view[block]
        if target.is_contiguous() and target.device == channel.device:
            window.read(block, target)
            running.add(target)
            continue
        num_bytes = target.numel() * target.element_size()
        staged = bucket.half(0, num_bytes, channel.device).view(view.dtype).view(target.shape)
        window.read(block, staged)
        running.add(staged)
        target.copy_(staged)
    return running.value


def _receive(
    channel: Channel,
    pieces: EdgePieces,
    held: HeldBoxes,
    bucket: _Borrowed,
    bucket_bytes: int,
    deadline: Deadline,
) -> list[int]:
    sums = PieceSums(pieces)
    under_way = _UnderWay(channel.capabilities.groups)
    batched = channel if isinstance(channel, BatchedChannel) else None
    stream = channel if isinstance(channel, StreamChannel) else None
    turn = 0
    for placed in _messages(channel, pieces, held, bucket_bytes):
        message = placed.message
        if stream is not None and placed.raw is not None:
            stream.recv_hashed(placed.raw, sums.running(message.chunks[0].piece), deadline)
            message.tell(held)
            continue
        view = placed.flat
        half = None if view is not None else turn % 2
        under_way.make_room(half)
        if view is None:
            view = bucket.half(turn, message.num_bytes, channel.device)
            turn += 1
        if batched is not None:
            wait = batched.begin_recv(view, deadline)
            under_way.add(partial(_end, wait, placed, view, held, sums), half)
        else:
            channel.recv_into(view, deadline)
            _end(None, placed, view, held, sums)
    under_way.drain()
    return sums.values()


def _end(
    wait: Callable[[], None] | None,
    placed: PlacedMessage,
    view: Tensor,
    held: HeldBoxes,
    sums: PieceSums,
) -> None:
    """Wait for a message that was begun, and do what is to be done once it is there."""
    if wait is not None:
        wait()
    placed.end(held, view, sums)
    placed.message.tell(held)


def compare_checksums(
    pieces: Sequence[Piece], sent: Sequence[int], arrived: Sequence[int], source: str
) -> None:
    """Hold what arrived against what was sent.

    Args:
        pieces: Of the edge.
        sent: What `serve_edge` returned at the source.
        arrived: What `pull_edge` returned here.
        source: Who the source is, for the error: ``sender rank 3``.

    Raises:
        DigestError: they differ; it names the first tensor and region that does.
    """
    if len(pieces) == len(sent) and sent == arrived:
        return
    for piece, expected, found in zip(pieces, sent, arrived, strict=True):
        if expected != found:
            raise DigestError(
                f"{piece.name} {piece.box}: {source} sent checksum {expected:016x}, "
                f"{found:016x} arrived"
            )
