"""Edges that move changes: over a channel in one process, whole and damaged."""

import threading
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from cosmos_weightsync import Box, DeadlineError, DigestError, ProtocolError
from cosmos_weightsync.buckets import LEAST_BUCKET_BYTES, BucketPool
from cosmos_weightsync.chunks import HeldBoxes, piece_checksum
from cosmos_weightsync.deadlines import Deadline
from cosmos_weightsync.edge_ends import EdgeEnd
from cosmos_weightsync.encodings.changed_edges import MovedEdge, pull_changes, serve_changes
from cosmos_weightsync.planning import Piece
from cosmos_weightsync.transports import Channel, TcpTransport

BUCKET = 64 << 10


def connected() -> tuple[Channel, Channel]:
    ends = [TcpTransport().prepare(side, "127.0.0.1") for side in ("sender", "receiver")]
    found: list[Channel] = []
    soon = Deadline.after(30)
    thread = threading.Thread(
        target=lambda: found.append(ends[0].connect(ends[1].description, soon))
    )
    thread.start()
    receiver = ends[1].connect(ends[0].description, soon)
    thread.join()
    return found[0], receiver


class Damaging:
    """A channel that damages one of the messages it sends."""

    def __init__(self, channel: Channel, number: int, damage: Callable[[Tensor], None]) -> None:
        self._channel = channel
        self._left = number
        self._damage = damage
        self.capabilities = channel.capabilities
        self.device = channel.device

    def send(self, view: Tensor, deadline: Deadline) -> None:
        view = view.clone()
        if self._left == 0:
            self._damage(view)
        self._left -= 1
        self._channel.send(view, deadline)

    def recv_into(self, view: Tensor, deadline: Deadline) -> None:
        self._channel.recv_into(view, deadline)

    def close(self) -> None:
        self._channel.close()


PIECES = [  # All rows of some columns; one row; nothing but a number.
    Piece("w", Box((0, 100), (300, 400)), 0, 0, 300 * 300 * 2),
    Piece("b", Box((3, 0), (4, 50)), 0, 0, 50 * 4),
    Piece("s", Box((), ()), 0, 0, 8),
]


def version(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "w": torch.randn(300, 500, generator=generator).bfloat16(),
        "b": torch.randn(8, 50, generator=generator),
        "s": torch.tensor(seed),
    }


def boxes(tensors: dict[str, Tensor]) -> HeldBoxes:
    return HeldBoxes((name, Box.full(t.shape), t) for name, t in tensors.items())


def cut(tensors: dict[str, Tensor], at: int) -> HeldBoxes:
    """The same where columns of ``w`` lie one after another, so that no piece of it lies whole."""
    rows, columns = tensors["w"].shape
    sides = [Box((0, 0), (rows, at)), Box((0, at), (rows, columns))]
    placed = [("w", box, tensors["w"][box.relative_to(Box.full((rows, columns)))]) for box in sides]
    rest = [(name, Box.full(t.shape), t) for name, t in tensors.items() if name != "w"]
    return HeldBoxes([*((name, box, part.contiguous()) for name, box, part in placed), *rest])


def ending(channel: Channel, bucket_bytes: int = BUCKET) -> EdgeEnd:
    return EdgeEnd(channel, PIECES, BucketPool(bucket_bytes), bucket_bytes)


def moved(
    base: dict[str, Tensor],
    new: dict[str, Tensor],
    number: int = -1,
    damage: Callable[[Tensor], None] = lambda _: None,
    bucket_bytes: int = BUCKET,
    held: Callable[[dict[str, Tensor]], HeldBoxes] = boxes,
) -> tuple[dict[str, Tensor], MovedEdge]:
    """What the receiver has afterwards, and what it says."""
    source, sink = connected()
    mine = {name: tensor.clone() for name, tensor in base.items()}
    soon = Deadline.after(30)

    def serve() -> None:
        channel = Damaging(source, number, damage)
        serve_changes(ending(channel, bucket_bytes), held(new), held(base), soon)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        pulled = pull_changes(ending(sink, bucket_bytes), boxes(mine), soon)
    finally:
        thread.join()
        source.close()
        sink.close()
    return mine, pulled


@pytest.mark.parametrize("held", [boxes, partial(cut, at=250)], ids=["whole", "cut"])
@pytest.mark.parametrize("bucket_bytes", [LEAST_BUCKET_BYTES, BUCKET, 16 << 20])
def test_the_pieces_change_and_nothing_else_does(bucket_bytes, held):
    base, new = version(1), version(2)
    mine, pulled = moved(base, new, bucket_bytes=bucket_bytes, held=held)
    assert pulled.checksums == [piece_checksum(boxes(new), piece) for piece in PIECES]
    assert torch.equal(mine["w"][:, 100:400], new["w"][:, 100:400])
    assert torch.equal(mine["w"][:, :100], base["w"][:, :100])
    assert torch.equal(mine["w"][:, 400:], base["w"][:, 400:])
    assert torch.equal(mine["b"][3], new["b"][3])
    assert torch.equal(mine["b"][:3], base["b"][:3])
    assert mine["s"] == 2


def test_an_edge_without_changes_is_a_few_bytes():
    _, pulled = moved(version(1), version(1))
    assert pulled.num_bytes < 200


def flip(view: Tensor) -> None:
    view[len(view) // 2] ^= 16


def test_a_damaged_frame_is_a_digest_error_that_says_where():
    with pytest.raises(DigestError, match=r"w \[0:\d+, 100:400\]: a frame of changes"):
        moved(version(1), version(2), 1, flip)


def test_a_damaged_head_is_a_protocol_error():
    with pytest.raises(ProtocolError, match="a frame of changes was due"):
        moved(version(1), version(1), 0, lambda view: view[0:4].zero_())


def test_frames_are_made_and_taken_in_the_bucket():
    source, sink = connected()
    soon = Deadline.after(0.2)
    serve = partial(serve_changes, held=boxes(version(2)), base=boxes(version(1)))
    pull = partial(pull_changes, held=boxes(version(1)))
    try:
        for channel, move in ((source, serve), (sink, pull)):
            end = ending(channel)
            with end.buckets.borrow() as taken:
                taken.take(BUCKET // 2 + 64, torch.device("cpu"), soon)
                with pytest.raises(DeadlineError, match="a part of the bucket of this process"):
                    move(end, deadline=soon)
    finally:
        source.close()
        sink.close()
