"""Moving the pieces of one edge, from a holder to a receiver, over one channel.

An edge is a source, a receiver and pieces in an order that both know from the plan. `serve_edge`
runs at the source and `pull_edge` at the receiver, at the same time; each returns the checksum of
every piece, and equal checksums are what makes a transfer good. Nothing but bytes crosses the
channel.

Over a one-sided channel the receiver copies out of the source's memory. Over a stream, pieces of
some size leave from the rows they lie in and are hashed as they arrive. Over the others the pieces
travel as messages, two packed ones at a time where the bucket has room: while one is on its way,
the source packs the next, and the receiver hashes and unpacks the one before. How many messages may
be under way is the transport's policy; a stream socket has its own window.

```
source    pack 0 │ pack 1 │ pack 2 │          two parts of its bucket
wire             │ send 0 │ send 1 │ send 2
receiver                  │ done 0 │ done 1 │ done 2
```
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from cosmos_weightsync.buckets import Borrower, BucketPool, Loan, half_of
from cosmos_weightsync.checksums import RunningChecksum, box_blocks
from cosmos_weightsync.chunks import HeldBoxes, piece_checksum
from cosmos_weightsync.deadlines import Deadline
from cosmos_weightsync.edge_pieces import Batch, EdgePieces, EdgePlaces
from cosmos_weightsync.errors import DigestError
from cosmos_weightsync.placed_messages import PieceSums, PlacedMessage
from cosmos_weightsync.planning import Piece
from cosmos_weightsync.stream_runs import Run
from cosmos_weightsync.streaming import StreamMoves
from cosmos_weightsync.transports import (
    BatchedChannel,
    Channel,
    Side,
    StreamChannel,
    Window,
    Windows,
    one_sided,
)

__all__ = ["compare_checksums", "pull_edge", "serve_edge", "source_checksums"]


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
        DigestError: what was sent is not what was written here.
    """
    pieces = EdgePieces.of(pieces)
    if one_sided(channel):
        # What is arriving is passed on as it is there, rather than once the last piece is.
        if held.is_arriving or not pieces.places(held).are_whole:
            channel.decline(deadline)
        elif channel.expose(pieces.places(held).views, held.arena, deadline):
            try:
                return source_checksums(pieces, held)
            finally:  # Its reader learns of an error once it has read, in the conversation.
                channel.await_finish(deadline)
    with buckets.borrow() as bucket:
        _send(channel, pieces, held, bucket, bucket_bytes, deadline)
    return source_checksums(pieces, held)


_MOST_PACKED = 2
_MOST_TOGETHER = 16
_FAST_S = 0.05


@dataclass(frozen=True, eq=False, slots=True)
class _Begun:
    """A message under way; see `_UnderWay.add`."""

    wait: Callable[[], None] | None
    loan: Loan | None
    finish: Callable[[], bool] | None


class _UnderWay:
    """Messages that were begun and are not done: a few, two of them at most in the bucket.

    To be woken for every message takes a busy machine as long as a small message does. So those
    that lie in place are waited for together, while others stay under way: as many as may be where
    nothing is to be done with them then, and up to a few, twice as many each time, while they
    arrive fast and nobody passes them on.
    """

    def __init__(self, most: int, bucket: Borrower) -> None:
        self._most = most
        self._bucket = bucket
        self._waiting: deque[_Begun] = deque()
        self._half = max(1, most // 2)
        self._together = 1

    def make_room(self) -> None:
        """End the oldest ones until there is room for another."""
        while len(self._waiting) >= self._most:
            self._end_oldest()

    def make_packed_room(self) -> None:
        """The same, for one in the bucket."""
        self.make_room()
        while len(self._bucket.loans) >= _MOST_PACKED:
            self._end_oldest()

    def add(
        self,
        wait: Callable[[], None] | None,
        loan: Loan | None,
        finish: Callable[[], bool] | None = None,
    ) -> None:
        """Another.

        Args:
            wait: Waits for it, and so for all before it; ``None`` if it is done.
            loan: Its part of the bucket, free once it is done.
            finish: To be called once it is done; says whether somebody waits to pass it on.
        """
        self._waiting.append(_Begun(wait, loan, finish))

    def drain(self) -> None:
        """End all."""
        while self._waiting:
            self._end_oldest()

    def _end_oldest(self) -> None:
        ended = [self._waiting.popleft()]
        while self._waiting and self._goes_with(ended[-1], self._waiting[0], len(ended)):
            ended.append(self._waiting.popleft())
        started = time.monotonic()
        for each in reversed(ended):
            if each.wait is not None:
                each.wait()
        is_urgent = time.monotonic() - started > _FAST_S
        for each in ended:
            is_urgent |= each.finish is not None and each.finish()
            if each.loan is not None:
                self._bucket.give_back(each.loan)
        more = min(2 * self._together, _MOST_TOGETHER, self._half)
        self._together = 1 if is_urgent else more

    def _goes_with(self, last: _Begun, following: _Begun, count: int) -> bool:
        """Whether the oldest ones, which are so many, are waited for together with the next."""
        if last.loan is not None or following.loan is not None:
            return False
        return count < (self._half if following.finish is None else self._together)


def _send(
    channel: Channel,
    pieces: EdgePieces,
    held: HeldBoxes,
    bucket: Borrower,
    bucket_bytes: int,
    deadline: Deadline,
) -> None:
    under_way = _UnderWay(channel.capabilities.groups, bucket)
    batched = channel if isinstance(channel, BatchedChannel) else None
    stream = channel if isinstance(channel, StreamChannel) else None
    for run in _runs(channel, "sender", pieces, held, bucket_bytes):
        if stream is not None and run.moves is not None:
            stream.send_moves(run.moves, deadline)
            continue
        (placed,) = run.placed
        if stream is not None and placed.rows is not None:
            stream.send_rows(placed.rows, deadline)
            continue
        content, loan = placed.flat, None
        if content is not None:
            under_way.make_room()
        else:
            if held.is_arriving:
                placed.message.await_views(held)
            under_way.make_packed_room()
            size = placed.message.num_bytes
            loan = bucket.take(size, channel.device, deadline, under_way.drain)
            content = placed.pack(held, loan.view)
        if batched is not None:
            under_way.add(batched.begin_send(content, deadline), loan)
        else:
            channel.send(content, deadline)
            under_way.add(None, loan)
        if batched is None or held.is_arriving:
            under_way.drain()  # Nothing is kept from others while this waits for what comes next.
    under_way.drain()


def source_checksums(pieces: Sequence[Piece], held: HeldBoxes) -> list[int]:
    """What is known of the version already, or computed now."""
    if held.checksums is not None:
        return held.checksums.of_pieces(pieces, held.checksum)
    return [piece_checksum(held, piece) for piece in pieces]


def _runs(
    channel: Channel, side: Side, pieces: EdgePieces, held: HeldBoxes, bucket_bytes: int
) -> Iterable[Run]:
    """The messages of the edge; two of them fit into a bucket. Over a stream many go in a run."""
    policy, device = channel.capabilities, channel.device
    size = min(half_of(bucket_bytes), policy.message_bytes)
    messages = pieces.messages(size, policy.direct_bytes)
    if held.is_arriving:  # Each is looked at when its turn has come, and waited for.
        return (Run([PlacedMessage(message, held, device)], None) for message in messages)
    places = pieces.places(held)
    placed = places.messages(messages, held, device)
    compiled = channel.compiled if isinstance(channel, StreamChannel) else None
    if compiled is None:
        return (Run([each], None) for each in placed)
    return places.runs(placed, side, compiled, size)


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
    with buckets.borrow(half_of(bucket_bytes)) as bucket:
        if one_sided(channel):
            places = pieces.places(held)
            windows = channel.windows(places.shapes, deadline)
            if windows is not None:
                sums: list[int] = []
                staging = _Staging(channel, bucket, half_of(bucket_bytes), deadline)
                for batch in places.batches(windows, half_of(bucket_bytes)):
                    deadline.remaining("the rest of the pieces")
                    sums += _read(windows, batch, places, staging)
                    held.arrived(pieces.regions[batch.first : batch.stop], batch.num_bytes)
                channel.finish(deadline)
                return sums
        return _receive(channel, pieces, held, bucket, bucket_bytes, deadline)


@dataclass(frozen=True, slots=True)
class _Staging:
    """Where a one-sided receiver puts what cannot be read into place."""

    channel: Channel
    bucket: Borrower
    most_bytes: int
    deadline: Deadline


def _read(windows: Windows, batch: Batch, places: EdgePlaces, staging: _Staging) -> list[int]:
    """Copy and hash pieces: in one go where both ends are rows of bytes, as they mostly are."""
    if batch.take is not None:
        return batch.take()
    numbers = range(batch.first, batch.stop)
    return [_read_boxes(windows[n], places.views[n], staging) for n in numbers]


def _read_boxes(window: Window, view: Tensor, staging: _Staging) -> int:
    """Any strides and devices, block by block, each hashed while the cache holds it."""
    running = RunningChecksum()
    channel, bucket = staging.channel, staging.bucket
    size = min(channel.capabilities.read_bytes, staging.most_bytes)
    for block in box_blocks(view.shape, view.element_size(), size):
        target = view[block]
        if target.is_contiguous() and target.device == channel.device:
            window.read(block, target)
            running.add(target)
            continue
        num_bytes = target.numel() * target.element_size()
        loan = bucket.take(num_bytes, channel.device, staging.deadline)
        staged = loan.view.view(view.dtype).view(target.shape)
        window.read(block, staged)
        running.add(staged)
        target.copy_(staged)
        bucket.give_back(loan)
    return running.value


def _receive(
    channel: Channel,
    pieces: EdgePieces,
    held: HeldBoxes,
    bucket: Borrower,
    bucket_bytes: int,
    deadline: Deadline,
) -> list[int]:
    sums = PieceSums(pieces)
    under_way = _UnderWay(channel.capabilities.groups, bucket)
    batched = channel if isinstance(channel, BatchedChannel) else None
    stream = channel if isinstance(channel, StreamChannel) else None
    for run in _runs(channel, "receiver", pieces, held, bucket_bytes):
        if stream is not None and run.moves is not None:
            _receive_run(stream, run, run.moves, held, sums, deadline)
            continue
        (placed,) = run.placed
        message = placed.message
        if stream is not None and placed.raw is not None:
            stream.recv_hashed(placed.raw, sums.running(message.chunks[0].piece), deadline)
            placed.tell(held)
            continue
        view, loan = placed.flat, None
        if view is not None:
            under_way.make_room()
        else:
            under_way.make_packed_room()
            loan = bucket.take(message.num_bytes, channel.device, deadline, under_way.drain)
            view = loan.view
        finish = partial(_finish, placed, view, held, sums)
        if batched is not None:
            under_way.add(batched.begin_recv(view, deadline), loan, finish)
        else:
            channel.recv_into(view, deadline)
            under_way.add(None, loan, finish)
            under_way.drain()
    under_way.drain()
    return sums.values()


def _receive_run(
    stream: StreamChannel,
    run: Run,
    moves: StreamMoves,
    held: HeldBoxes,
    sums: PieceSums,
    deadline: Deadline,
) -> None:
    values = stream.recv_moves(moves, deadline)
    for placed, value in zip(run.placed, values, strict=True):
        sums.know(placed.message.chunks[0].piece, value)
        placed.tell(held)


def _finish(placed: PlacedMessage, view: Tensor, held: HeldBoxes, sums: PieceSums) -> bool:
    """What is to be done with a message that is there; see `PlacedMessage.tell`."""
    placed.end(held, view, sums)
    return placed.tell(held)


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
