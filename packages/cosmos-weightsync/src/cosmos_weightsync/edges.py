"""Moving the pieces of one edge, from a holder to a receiver, over one channel.

An edge is a source, a receiver and pieces in an order that both know from the plan. `serve_edge`
runs at the source and `pull_edge` at the receiver, at the same time; each returns the checksum of
every piece, and equal checksums are what makes a transfer good. Nothing but bytes crosses the
channel.
"""

import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from cosmos_weightsync.chunks import (
    HeldBoxes,
    add_checksums,
    message_view,
    pack,
    schedule,
    unpack,
)
from cosmos_weightsync.deadlines import Deadline
from cosmos_weightsync.errors import DigestError
from cosmos_weightsync.planning import Piece
from cosmos_weightsync.transports import Channel

__all__ = ["BucketPool", "compare_checksums", "pull_edge", "serve_edge"]


class BucketPool:
    """Staging memory for small and strided pieces, shared by the edges of one process.

    A bucket is allocated when a message first needs packing and is kept for the next edge, so
    there are never more buckets than edges at work at the same time. May be used from any thread.

    Args:
        bucket_bytes: The size of each; messages are at most so long.
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
        self.taken: Tensor | None = None

    def on(self, device: torch.device) -> Tensor:
        if self.taken is None:
            self.taken = self._pool.take(device)
        return self.taken


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
    sums: dict[int, int] = {}
    with buckets.borrow() as bucket:
        for message in schedule(pieces, bucket_bytes):
            content = message_view(message, held, channel.device)
            if content is None:
                content = pack(message, held, bucket.on(channel.device))
            channel.send(content, deadline)
            add_checksums(message, content, sums)
    return [sums[index] for index in range(len(pieces))]


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
    sums: dict[int, int] = {}
    with buckets.borrow() as bucket:
        for message in schedule(pieces, bucket_bytes):
            direct = message_view(message, held, channel.device)
            view = bucket.on(channel.device)[: message.num_bytes] if direct is None else direct
            channel.recv_into(view, deadline)
            add_checksums(message, view, sums)
            if direct is None:
                unpack(message, held, view)
    return [sums[index] for index in range(len(pieces))]


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
