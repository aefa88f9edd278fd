"""Moving the pieces of one edge, from a holder to a receiver, over one channel.

An edge is a source, a receiver and pieces in an order that both know from the plan. `serve_edge`
runs at the source and `pull_edge` at the receiver, at the same time; each returns the checksum of
every piece, and equal checksums are what makes a transfer good. Nothing but bytes crosses the
channel.

Over a one-sided channel the receiver copies out of the source's memory. Over the others the pieces
travel as messages, two at a time in the bucket: while one is on its way, the source packs the next,
and the receiver hashes and unpacks the one before.

```
source    pack 0 │ pack 1 │ pack 2 │          halves of its bucket in turn
wire             │ send 0 │ send 1 │ send 2
receiver                  │ done 0 │ done 1 │ done 2
```
"""

import threading
from collections.abc import Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import torch
from torch import Tensor

from cosmos_weightsync.checksums import RunningChecksum, box_blocks, tensor_checksum
from cosmos_weightsync.chunks import (
    HeldBoxes,
    Message,
    add_checksums,
    message_view,
    pack,
    schedule,
    unpack,
)
from cosmos_weightsync.deadlines import Deadline
from cosmos_weightsync.errors import DigestError
from cosmos_weightsync.planning import Piece
from cosmos_weightsync.transports import Channel, OneSidedChannel, Window

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
    return bucket_bytes // (2 * _ALIGNMENT) * _ALIGNMENT


_ALIGNMENT = 64


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
    if isinstance(channel, OneSidedChannel):
        views = [held.view(piece.name, piece.box) for piece in pieces]
        if channel.expose(views, held.arena, deadline):
            sums = source_checksums(pieces, held)
            channel.await_finish(deadline)
            return sums
    messages = _messages(channel, pieces, bucket_bytes)
    with buckets.borrow() as bucket, ThreadPoolExecutor(1, "weight-pack") as packer:

        def ready(turn: int) -> Tensor:
            message = messages[turn]
            content = message_view(message, held, channel.device)
            if content is None:
                half = bucket.half(turn, message.num_bytes, channel.device)
                content = pack(message, held, half)
            return content

        coming = packer.submit(ready, 0) if messages else None
        for turn in range(len(messages)):
            content = _result(coming)
            coming = packer.submit(ready, turn + 1) if turn + 1 < len(messages) else None
            channel.send(content, deadline)
        return source_checksums(pieces, held)


def _result(future: "Future[Tensor] | None") -> Tensor:
    assert future is not None
    return future.result()


def source_checksums(pieces: Sequence[Piece], held: HeldBoxes) -> list[int]:
    """What is known of the version already, or computed now."""
    if held.checksums is not None:
        return held.checksums.of_pieces(pieces, held.view)
    return [tensor_checksum(held.view(piece.name, piece.box)) for piece in pieces]


def _messages(channel: Channel, pieces: Sequence[Piece], bucket_bytes: int) -> list[Message]:
    """The messages of the edge; two of them fit into a bucket."""
    policy = channel.capabilities
    size = min(half_of(bucket_bytes), policy.message_bytes)
    return list(schedule(pieces, size, policy.direct_bytes))


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
    with buckets.borrow() as bucket:
        if isinstance(channel, OneSidedChannel):
            views = [held.view(piece.name, piece.box) for piece in pieces]
            windows = channel.windows([(view.shape, view.dtype) for view in views], deadline)
            if windows is not None:
                sums: list[int] = []
                for piece, window, view in zip(pieces, windows, views, strict=True):
                    deadline.remaining("the rest of the pieces")
                    sums.append(_read(channel, window, view, bucket))
                    held.arrived(piece.name, piece.box)
                channel.finish(deadline)
                return sums
        return _receive(channel, pieces, held, bucket, bucket_bytes, deadline)


def _read(channel: Channel, window: Window, view: Tensor, bucket: _Borrowed) -> int:
    """Copy a piece block by block, hashing each while it is in the processor's cache."""
    running = RunningChecksum()
    for block in box_blocks(view.shape, view.element_size(), bucket.half_bytes):
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
    pieces: Sequence[Piece],
    held: HeldBoxes,
    bucket: _Borrowed,
    bucket_bytes: int,
    deadline: Deadline,
) -> list[int]:
    sums: dict[int, RunningChecksum] = {}

    def finish(message: Message, view: Tensor, is_direct: bool) -> None:
        add_checksums(message, view, sums)
        if not is_direct:
            unpack(message, held, view)
        for chunk in message.chunks:
            held.arrived(chunk.name, chunk.box)

    with ThreadPoolExecutor(1, "weight-unpack") as unpacker:
        before: list[Future[None]] = []
        for turn, message in enumerate(_messages(channel, pieces, bucket_bytes)):
            if len(before) > 1:  # The one that used this half.
                before.pop(0).result()
            direct = message_view(message, held, channel.device)
            view = (
                bucket.half(turn, message.num_bytes, channel.device) if direct is None else direct
            )
            channel.recv_into(view, deadline)
            before.append(unpacker.submit(finish, message, view, direct is not None))
        for future in before:
            future.result()
    return [sums[index].value for index in range(len(pieces))]


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
    for piece, expected, found in zip(pieces, sent, arrived, strict=True):
        if expected != found:
            raise DigestError(
                f"{piece.name} {piece.box}: {source} sent checksum {expected:016x}, "
                f"{found:016x} arrived"
            )
