"""A version that is refused or breaks costs itself: the one in use stays, and the next comes."""

import json
import socket
import struct
import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from cosmos_weightsync import (
    BaseVersionError,
    Box,
    DigestError,
    FileReceiver,
    FileSender,
    LayoutError,
    PeerLostError,
    ProtocolError,
    ReceiverConfig,
    Shard,
    ShardSpec,
    UncoveredRegionError,
    UnknownTensorError,
    WeightReceiver,
    WeightSender,
    shards_of,
)
from cosmos_weightsync.deadlines import Deadline
from cosmos_weightsync.frames import parse_endpoint
from cosmos_weightsync.holding import Reader, VersionRange
from cosmos_weightsync.reuse import Offer
from cosmos_weightsync.sender import standard_transports
from cosmos_weightsync.transports import LocalTransport, TcpTransport

SHAPES = {"wide": (64, 48), "norm": (16,)}
SMALL = ReceiverConfig(transport="tcp", bucket_bytes=2048)


class Breakable:
    """TCP whose sender can be told to spoil what it sends."""

    name = "tcp"
    capabilities = TcpTransport().capabilities

    def __init__(self) -> None:
        self.send: Callable[[Any, torch.Tensor, Deadline], None] = self.whole

    @staticmethod
    def whole(channel, view, deadline) -> None:
        channel.send(view, deadline)

    def prepare(self, side, host):
        pending = TcpTransport().prepare(side, host)
        return pending if side == "receiver" else _BreakablePending(self, pending)


class _BreakablePending:
    def __init__(self, transport: Breakable, pending) -> None:
        self._transport, self._pending = transport, pending
        self.description, self.close = pending.description, pending.close

    def connect(self, peer, deadline):
        return _BreakableChannel(self._transport, self._pending.connect(peer, deadline))


class _BreakableChannel:
    def __init__(self, transport: Breakable, channel) -> None:
        self._transport, self._channel = transport, channel
        self.device, self.close = channel.device, channel.close
        self.capabilities = channel.capabilities

    def send(self, view, deadline) -> None:
        self._transport.send(self._channel, view, deadline)


class Rewriter:
    """A way to a sender on which the frames ``open`` are changed.

    It stands in for a reader that runs another version of this library.
    """

    def __init__(self, stack: ExitStack, endpoint: str, **changed: object) -> None:
        self._there, self._changed = parse_endpoint(endpoint), changed
        self._listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        self.endpoint = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        with suppress(OSError):  # The listener is closed at the end.
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(self._there)
                for work in (self._rewrite, self._carry):
                    threading.Thread(target=work, args=(near, far), daemon=True).start()

    def _rewrite(self, near: socket.socket, far: socket.socket) -> None:
        with suppress(OSError), near.makefile("rb") as frames:
            while len(head := frames.read(4)) == 4:
                frame = json.loads(frames.read(struct.unpack("!I", head)[0]))
                if frame["kind"] == "open":
                    frame |= self._changed
                body = json.dumps(frame).encode()
                far.sendall(struct.pack("!I", len(body)) + body)
            far.shutdown(socket.SHUT_WR)

    def _carry(self, near: socket.socket, far: socket.socket) -> None:
        with suppress(OSError):
            while content := far.recv(1 << 16):
                near.sendall(content)
            near.shutdown(socket.SHUT_WR)


@dataclass
class Scene:
    """A trainer of two ranks, of which rank 1 is breakable, and a receiver that has version 1."""

    stack: ExitStack
    make_trainer: Callable[..., Any]
    served: dict[str, torch.Tensor]
    breakable: Breakable = field(default_factory=Breakable)
    config: ReceiverConfig = SMALL

    def __post_init__(self) -> None:
        self.trainer = self.make_trainer(SHAPES, hooks={1: self.breakable})
        wanted = shards_of(self.served.items())
        receiver = WeightReceiver(self.trainer.endpoints, wanted=wanted, config=self.config)
        self.receiver = self.stack.enter_context(receiver)

    def connect_to(self, dtype: str, shape: tuple[int, int], stop: int) -> None:
        """Fetch from other senders, of which the second has ``wide`` from row 32 to ``stop``."""
        senders = []
        for rank, rows in enumerate([(0, 32), (32, stop)]):
            box = Box((rows[0], 0), (rows[1], shape[1]))
            content = torch.ones(box.shape, dtype=getattr(torch, dtype))
            held = [Shard(ShardSpec("wide", shape, box, dtype), content)]
            held += shards_of([("norm", torch.ones(16))]) if rank == 0 else []
            sender = self.stack.enter_context(WeightSender(held, rank=rank, num_ranks=2))
            sender.publish(2)
            senders.append(sender.endpoint)
        self.receiver.connect(senders)

    def connect_through(self, **changed: object) -> None:
        """Open rank 1 in other words than the receiver's."""
        first, second = self.trainer.endpoints
        self.receiver.connect([first, Rewriter(self.stack, second, **changed).endpoint])

    def stage(self) -> None:
        self.receiver.stage(2, timeout_s=30)


def flip(scene: Scene) -> None:
    scene.breakable.send = lambda channel, view, deadline: channel.send(view ^ 1, deadline)


def truncate(scene: Scene) -> None:
    def half(channel, view, deadline) -> None:
        channel.send(view[: len(view) // 2], deadline)
        raise PeerLostError("cut off by the test")

    scene.breakable.send = half


def end_half_way(scene: Scene) -> None:
    sent = []

    def one(channel, view, deadline) -> None:
        if sent:
            threading.Thread(target=scene.trainer.senders[1].close).start()
            raise PeerLostError("ended by the test")
        sent.append(len(view))
        channel.send(view, deadline)

    scene.breakable.send = one


def leave_rows_out(scene: Scene) -> None:
    scene.connect_to("float32", (64, 48), 60)


def change_the_dtype(scene: Scene) -> None:
    scene.connect_to("int32", (64, 48), 64)


def change_the_shape(scene: Scene) -> None:
    scene.connect_to("float32", (64, 40), 64)


def change_the_digest(scene: Scene) -> None:
    scene.connect_through(digest="0" * 32)


def change_the_transport(scene: Scene) -> None:
    scene.connect_through(transport="pigeon")


def offer_another_base(scene: Scene) -> None:
    """The receiver takes everything anew where its base is wrong; so ask for changes alone."""
    session = scene.receiver._fetcher._edges[1].session
    assert session is not None

    def pull() -> None:
        deadline, shadow = Deadline.after(30), scene.receiver._shadow
        held = {(shard.spec.name, shard.spec.box): shard.tensor for shard in shadow.shards}
        held["wide", Box.full((64, 48))].view(torch.int32)[40, 7] ^= 1
        session.pin(2, "newest", deadline)
        offer = Offer(1, "", "changes")
        session.pull(shadow.here(), scene.receiver._buckets, deadline, offer=offer)

    scene.stage = pull


WIDE = r"wide \[32:64, 0:48\]"


@pytest.mark.parametrize(
    ("break_it", "error", "words"),
    [
        (flip, DigestError, rf"{WIDE}: sender rank 1 sent checksum"),
        (truncate, PeerLostError, rf"sender rank 1 .* nobody else .* has {WIDE} .* of version 2"),
        (end_half_way, PeerLostError, r"sender rank 1 .* has wide \[3\d:64, 0:48\] .*version 2"),
        (leave_rows_out, UncoveredRegionError, r"wide .* needs \[0:64, 0:48\].*\[60:64, 0:48\]"),
        (change_the_dtype, LayoutError, r"wide \[0:64, .*wanted here as float32, sender rank 0 "),
        (change_the_shape, UnknownTensorError, r"wide: receivers want .*of sender 0"),
        (change_the_digest, ProtocolError, r"sender rank 1: planned 0+, the same pieces are "),
        (change_the_transport, ProtocolError, r"sender rank 1: transport 'pigeon' is none of \["),
        (offer_another_base, BaseVersionError, r"wide .*the receiver's version 1 is not that"),
    ],
)
def test_what_goes_wrong_with_a_version_is_named_and_the_one_in_use_stays(
    stack, make_trainer, break_it, error, words
):
    served = {name: torch.full(shape, -1.0) for name, shape in SHAPES.items()}
    scene = Scene(stack, make_trainer, served)
    first = scene.trainer.publish(1)
    scene.receiver.stage(1)
    scene.receiver.commit()
    break_it(scene)
    scene.trainer.publish(2)
    with pytest.raises(error, match=words):
        scene.stage()
    assert scene.receiver.version == 1
    assert scene.receiver.staged is None or break_it is offer_another_base
    assert all(tensor.equal(first[name]) for name, tensor in served.items())
    scene.breakable.send = Breakable.whole
    trainer = make_trainer(SHAPES) if break_it is end_half_way else scene.trainer
    third = trainer.publish(3)
    scene.receiver.connect(trainer.endpoints)
    assert scene.receiver.stage(3, timeout_s=30).version == scene.receiver.commit() == 3
    assert all(tensor.equal(third[name]) for name, tensor in served.items())


def damage(sender: WeightSender, version: int) -> None:
    """Change one bit of a version that is published and hashed, as a bad memory would."""
    store = sender._snapshots
    pin = store.pin(VersionRange(version), Deadline.after(10), Reader("memory", lambda: None))
    pin.tensors[0][20, 7:8].view(torch.int32).bitwise_xor_(1)
    store.unpin(pin)


def transports() -> list[str]:
    named = {one.name for one in standard_transports()} - {"cuda_ipc"}
    return sorted({*named, "local"})


@pytest.mark.parametrize("transport", transports())
def test_a_snapshot_that_changes_after_it_was_hashed_is_never_in_use(
    stack, make_trainer, transport
):
    """Whatever way it comes: most transports read the very memory that was damaged."""
    local = LocalTransport()
    trainer = make_trainer(SHAPES, transports=[local])
    served = {name: torch.full(shape, -1.0) for name, shape in SHAPES.items()}
    receiver = WeightReceiver(
        trainer.endpoints,
        wanted=shards_of(served.items()),
        config=ReceiverConfig(transport=transport),
        transports=[local],
    )
    stack.enter_context(receiver)
    first = trainer.publish(1)
    receiver.stage(1)
    receiver.commit()
    trainer.publish(2)
    damage(trainer.senders[1], 2)
    with pytest.raises(DigestError, match=rf"{WIDE}: sender rank 1 sent checksum"):
        receiver.stage(2, timeout_s=60)
    assert (receiver.version, receiver.staged) == (1, None)
    assert all(tensor.equal(first[name]) for name, tensor in served.items())
    third = trainer.publish(3)
    assert receiver.stage(3, timeout_s=60).version == receiver.commit() == 3
    assert all(tensor.equal(third[name]) for name, tensor in served.items())


SENT, MADE = r"sender rank 1 sent checksum", r"what is kept of the version here has changed"
CUTS = {  # and who notices, for the first version and one of which others have read already
    "all rows": (Box.full((64, 48)), (SENT, SENT)),
    "some columns": (Box((8, 0), (60, 40)), (MADE, SENT)),
}


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("transport", transports())
def test_a_snapshot_that_changes_before_anybody_read_it_is_never_in_use(
    stack, make_trainer, transport, cut
):
    """Nor one of which others have read other parts."""
    local = LocalTransport()
    trainer = make_trainer(SHAPES, transports=[local])
    config = ReceiverConfig(transport=transport)

    def receiver_of(box: Box) -> WeightReceiver:
        wanted = [ShardSpec("wide", (64, 48), box, "float32")]
        made = WeightReceiver(trainer.endpoints, wanted=wanted, config=config, transports=[local])
        return stack.enter_context(made)

    box, words = CUTS[cut]
    others = receiver_of(Box((40, 2), (50, 9)))
    for version, who in zip((1, 3), words, strict=True):
        trainer.publish(version)
        damage(trainer.senders[1], version)
        receiver = receiver_of(box)
        with pytest.raises(DigestError, match=rf"sender rank 1 .*wide \[32:.*{who}"):
            receiver.stage(version, timeout_s=60)
        assert (receiver.version, receiver.staged) == (None, None)
        good = trainer.publish(version + 1)["wide"][box.relative_to(Box.full((64, 48)))]
        receiver.stage(version + 1, timeout_s=60)
        assert receiver.staged_shards()[0].tensor.equal(good)
        receiver.close()
        others.stage(version + 1, timeout_s=60)


class Interrupting(torch.Tensor):
    """Where Ctrl-C arrives just before it is copied into, once it is told to."""

    is_told = False

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is torch.Tensor.copy_ and cls.is_told:
            raise KeyboardInterrupt
        return super().__torch_function__(func, types, args, kwargs or {})


@pytest.mark.parametrize("receives", ["from a sender", "from files"])
def test_a_commit_that_is_broken_off_leaves_no_version_until_one_succeeds(
    stack, make_trainer, tmp_path, receives
):
    trainer = make_trainer(SHAPES)
    first = torch.full((64, 48), -1.0)
    served = {"wide": first, "norm": torch.full((16,), -1.0).as_subclass(Interrupting)}
    wanted = shards_of(served.items())
    if receives == "from files":
        files = FileSender(shards_of(trainer.full.items()), tmp_path)
        publish, receiver = files.publish, FileReceiver(tmp_path, wanted=wanted)
    else:
        publish = trainer.publish
        receiver = stack.enter_context(WeightReceiver(trainer.endpoints, wanted=wanted))
    for version in (1, 2):
        trainer.step(version)
        publish(version)
        receiver.stage(version, timeout_s=30)
        if version == 1:
            receiver.commit()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Interrupting, "is_told", True)
        with pytest.raises(KeyboardInterrupt):
            receiver.commit()
    assert first.equal(trainer.full["wide"])  # of version 2, beside a norm of version 1
    assert not served["norm"].equal(trainer.full["norm"])
    assert receiver.version is None
    assert receiver.commit() == receiver.version == 2
    assert all(tensor.equal(trainer.full[name]) for name, tensor in served.items())
