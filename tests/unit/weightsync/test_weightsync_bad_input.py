"""What must be refused is refused by name, and the receiver keeps what it had."""

import socket
import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress

import pytest
import torch

from cosmos_weightsync import (
    Box,
    DeadlineError,
    DigestError,
    FileReceiver,
    FileSender,
    FileSenderConfig,
    Layout,
    LayoutError,
    PeerLostError,
    ProtocolError,
    ReceiverConfig,
    SenderConfig,
    Shard,
    ShardSpec,
    UncoveredRegionError,
    UnknownTensorError,
    VersionGoneError,
    WeightReceiver,
    WeightSender,
    shards_of,
)
from cosmos_weightsync.deadlines import Deadline
from cosmos_weightsync.encodings import Cast
from cosmos_weightsync.frames import ControlConnection, connect_control
from cosmos_weightsync.receiver_session import ReceiverSession
from cosmos_weightsync.serving import PROTOCOL
from cosmos_weightsync.transports import TcpTransport


@pytest.fixture
def sender(stack: ExitStack) -> WeightSender:
    tensor = torch.arange(600.0).view(30, 20)
    found = stack.enter_context(WeightSender(shards_of([("w", tensor), ("b", torch.ones(5))])))
    found.publish(1)
    return found


def rows(start: int, stop: int, dtype: str = "float32", shape=(30, 20)) -> ShardSpec:
    return ShardSpec("w", shape, Box((start, 0), (stop, shape[1])), dtype)


def soon() -> Deadline:
    return Deadline.after(20)


class Flipper:
    """A proxy between a receiver and the channel of a sender; it damages what goes through.

    It stands in for a bad network: what it changes are bytes in a real TCP stream.
    """

    def __init__(self, address: tuple[str, int], damage: Callable[[bytes], bytes]) -> None:
        self._address, self._damage = address, damage
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        reader, _ = self._listener.accept()
        with reader, socket.create_connection(self._address) as source, self._listener:
            source.sendall(reader.recv(32))  # The key.
            with suppress(ConnectionError):  # Its reader may leave first.
                while content := source.recv(4096):
                    damaged = self._damage(content)
                    reader.sendall(damaged)
                    if len(damaged) < len(content):
                        return


class ProxiedTransport(TcpTransport):
    """TCP whose receivers connect to a proxy in front of the sender."""

    def __init__(self, damage: Callable[[bytes], bytes]) -> None:
        super().__init__()
        self._damage = damage

    def prepare(self, side, host):
        pending = super().prepare(side, host)
        return pending if side == "sender" else _Proxied(pending, self._damage)


class _Proxied:
    def __init__(self, pending, damage) -> None:
        self._pending, self._damage = pending, damage
        self.description, self.close = pending.description, pending.close

    def connect(self, peer, deadline):
        proxy = Flipper((peer["host"], peer["port"]), self._damage)
        return self._pending.connect({**peer, "port": proxy.port}, deadline)


def flip(content: bytes) -> bytes:
    return content[:-1] + bytes([content[-1] ^ 4])


def cut(content: bytes) -> bytes:
    return content[: len(content) // 2]


@pytest.mark.parametrize(
    ("damage", "error", "message"),
    [
        (flip, DigestError, r"w \[\d+:\d+, 0:20\]: sender rank 0 sent checksum"),
        (cut, PeerLostError, r"sender rank 0 .* nobody else .* has w .* of version 1"),
    ],
)
def test_damage_on_the_wire_is_an_error_that_names_the_region(
    stack, sender, damage, error, message
):
    served = {"w": torch.full((30, 20), -1.0)}
    receiver = WeightReceiver(
        [sender.endpoint],
        wanted=shards_of(served.items()),
        config=ReceiverConfig(transport="tcp"),
        transports=[ProxiedTransport(damage)],
    )
    stack.enter_context(receiver)
    with pytest.raises(error, match=message):
        receiver.stage(1, timeout_s=20)
    assert (receiver.version, receiver.staged) == (None, None)
    assert served["w"].eq(-1).all()


X_WANTED = r"x \[0:2\]: wanted here, none of 1 sender ranks has it"
W_SHAPE = (
    r"w: receivers want shape \(30, 21\), senders have \(30, 20\): "
    r"\[0:30, 0:21\] of receiver 0 against \[0:30, 0:20\] of sender 0"
)
W_DTYPE = r"w \[0:4, 0:20\]: wanted here as bfloat16, sender rank 0 sends float32"


@pytest.mark.parametrize(
    ("wanted", "error", "message"),
    [
        ([ShardSpec("x", (2,), Box.full((2,)), "float32")], UnknownTensorError, X_WANTED),
        ([rows(0, 30, shape=(30, 21))], UnknownTensorError, W_SHAPE),
        ([rows(0, 4, dtype="bfloat16")], LayoutError, W_DTYPE),
    ],
)
def test_layouts_that_do_not_fit_are_refused_and_the_version_in_use_stays(
    stack, sender, wanted, error, message
):
    receiver = stack.enter_context(WeightReceiver([sender.endpoint], wanted=wanted))
    with pytest.raises(error, match=message):
        receiver.stage(1)
    assert receiver.version is None


def test_a_region_that_nobody_offers_is_named_with_the_rank_that_wants_it(stack):
    half = Shard(rows(0, 15), torch.zeros(15, 20))
    sender = stack.enter_context(WeightSender([half]))
    sender.publish(1)
    receiver = stack.enter_context(WeightReceiver([sender.endpoint], wanted=[rows(10, 30)]))
    with pytest.raises(UncoveredRegionError, match=r"receiver 0 needs \[10:30, 0:20\].*\[15:30"):
        receiver.stage(1)


@pytest.mark.parametrize("other", [rows(5, 9), rows(0, 30), rows(9, 12)])
def test_a_region_wanted_twice_is_named(other):
    with pytest.raises(LayoutError, match=r"w: this receiver wants \[\d+:\d+, 0:20\] twice"):
        WeightReceiver(["127.0.0.1:1"], wanted=[rows(0, 10), other])


def test_a_region_held_twice_by_one_rank_is_named(tmp_path):
    """One of the two would be sent, and nobody could say which."""
    held = [Shard(rows(0, 10), torch.zeros(10, 20)), Shard(rows(8, 30), torch.ones(22, 20))]
    message = r"w: sender rank 3 holds \[8:10, 0:20\] twice, in \[0:10.* and in \[8:30"
    with pytest.raises(LayoutError, match=message):
        WeightSender(held, rank=3, num_ranks=4)
    config = FileSenderConfig(session="s")
    with pytest.raises(LayoutError, match=message):
        FileSender(held, tmp_path, rank=3, num_ranks=4, config=config)


def test_pieces_next_to_one_another_are_not_wanted_twice(stack, sender):
    wanted = [rows(0, 10), rows(10, 30)]
    receiver = stack.enter_context(WeightReceiver([sender.endpoint], wanted=wanted))
    assert receiver.stage(1).num_bytes == 30 * 20 * 4


def raw(stack: ExitStack, sender: WeightSender) -> ControlConnection:
    connection = connect_control(sender.endpoint, soon())
    stack.callback(connection.close)
    connection.send("hello", {"protocol": PROTOCOL, "token": ""}, soon())
    connection.receive(soon(), expect="welcome")
    return connection


def opening(sender: WeightSender, wanted: list[ShardSpec], **changed: object) -> dict[str, object]:
    layout = Layout.from_ranks([wanted])
    return {
        "transport": "tcp",
        "channel": {},
        "bucket_bytes": 4096,
        "seconds": 10.0,
        "pieces": layout.to_json(),
        "digest": layout.digest(),
        "layout": sender.layout.digest(),
        **changed,
    }


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"transport": "pigeon"}, ProtocolError, "'pigeon' is none of"),
        ({"digest": "0" * 32}, ProtocolError, "planned 000.* are .* here"),
        ({"layout": "0" * 32}, ProtocolError, "sender rank 0 has another"),
        ({"pieces": {"num_ranks": 1}}, LayoutError, "not a layout"),
        ({"bucket_bytes": "many"}, ProtocolError, "malformed 'open'"),
        ({"bucket_bytes": 1023}, ProtocolError, "a bucket of 1023 bytes is too small"),
    ],
)
def test_a_reader_with_another_plan_is_refused(stack, sender, changed, error, message):
    connection = raw(stack, sender)
    connection.send("open", opening(sender, [rows(0, 4)], **changed), soon())
    with pytest.raises(error, match=message):
        connection.receive(soon(), expect="opened")


@pytest.mark.parametrize(
    ("wanted", "error", "message"),
    [
        (rows(0, 4, dtype="float16"), LayoutError, r"w \[0:4, .*: wanted as float16"),
        (
            rows(0, 4, shape=(30, 10)),
            LayoutError,
            r"wanted as float32 \(30, 10\), held by sender rank 0 as",
        ),
        (
            ShardSpec("x", (2,), Box.full((2,)), "float32"),
            UnknownTensorError,
            "x .*: sender rank 0 has no",
        ),
    ],
)
def test_a_holder_gives_only_what_it_holds(stack, sender, wanted, error, message):
    connection = raw(stack, sender)
    connection.send("open", opening(sender, [wanted]), soon())
    with pytest.raises(error, match=message):
        connection.receive(soon(), expect="opened")


def test_a_region_outside_of_what_a_holder_holds_is_refused(stack):
    sender = stack.enter_context(WeightSender([Shard(rows(0, 15), torch.zeros(15, 20))]))
    connection = raw(stack, sender)
    connection.send("open", opening(sender, [rows(10, 20)]), soon())
    with pytest.raises(
        UncoveredRegionError, match=r"w \[10:20, 0:20\].*\[15:20, 0:20\] is missing"
    ):
        connection.receive(soon(), expect="opened")


@pytest.mark.parametrize("kind", ["pull", "checksums", "nonsense"])
def test_frames_out_of_order_are_refused(stack, sender, kind):
    connection = raw(stack, sender)
    connection.send(kind, {"seconds": 5.0}, soon())
    with pytest.raises(ProtocolError, match=r"comes after|does not know"):
        connection.receive(soon(), expect="sent")


def test_another_protocol_is_refused(stack, sender):
    connection = connect_control(sender.endpoint, soon())
    stack.callback(connection.close)
    connection.send("hello", {"protocol": PROTOCOL + 1, "token": ""}, soon())
    with pytest.raises(ProtocolError, match=f"speaks protocol {PROTOCOL}"):
        connection.receive(soon(), expect="welcome")


def test_a_version_that_was_superseded_is_gone_and_is_not_waited_for(stack, sender):
    for version in (2, 3, 4):
        sender.publish(version)
    session = ReceiverSession(sender.endpoint, "", soon())
    stack.callback(session.close)
    with pytest.raises(VersionGoneError, match="version 1 was superseded by 4"):
        session.pin(1, "newest", soon(), at_most=1)


def test_a_sender_that_is_silent_in_the_middle_runs_into_the_patience_of_its_reader(stack, sender):
    """Alive, connected, and sending nothing: a process that is stopped, or a lost route."""
    stop = threading.Event()
    stack.callback(stop.set)

    def hold(content: bytes) -> bytes:
        stop.wait(60)
        return content

    receiver = WeightReceiver(
        [sender.endpoint],
        config=ReceiverConfig(transport="tcp", stall_s=0.5),
        transports=[ProxiedTransport(hold)],
    )
    stack.enter_context(receiver)
    with pytest.raises(DeadlineError, match=r"sender rank 0 .* nobody else"):
        receiver.stage(1, timeout_s=60)


def test_verify_asks_the_sender_what_it_has(stack, sender):
    """A receiver whose memory agrees with what once arrived, and not with the sender."""
    receiver = stack.enter_context(WeightReceiver([sender.endpoint], wanted=[rows(0, 30)]))
    receiver.stage(1)
    receiver.verify()
    receiver.staged_shards()[0].tensor[3, 3] += 1
    with pytest.raises(DigestError, match=r"w .*: not what sender rank 0 sent"):
        receiver.verify()


def resident_bytes() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * 4096


def test_idle_readers_hold_no_bucket(stack):
    """60 readers of a sender with buckets of 16 MiB, 1 GiB if each had one, take their turns."""
    tensor = torch.ones(100, 100)
    sender = stack.enter_context(WeightSender(shards_of([("w", tensor)])))
    sender.publish(1)
    config = ReceiverConfig(transport="tcp", num_threads=1)
    before = resident_bytes()
    for _ in range(60):
        receiver = stack.enter_context(WeightReceiver([sender.endpoint], config=config))
        receiver.stage(1)
    assert sender.num_sessions == 60
    assert resident_bytes() - before < 256 << 20


@pytest.mark.parametrize(
    ("sent", "wanted"),
    [
        (torch.float32, torch.int32),
        (torch.float32, torch.bool),
        (torch.bfloat16, torch.uint8),
        (torch.float32, torch.float8_e8m0fnu),
        (torch.int64, torch.uint8),
        (torch.int64, torch.float16),
        (torch.uint8, torch.int8),
        (torch.bool, torch.float32),
    ],
)
def test_numbers_of_another_kind_are_refused_and_what_is_there_stays(stack, tmp_path, sent, wanted):
    held = shards_of([("w", torch.tensor([0, 1, 300, -2]).to(sent))])
    served = torch.ones(4).to(wanted)
    kinds = f"wanted here as {wanted}, ".replace("torch.", "")
    live = stack.enter_context(WeightSender(held))
    live.publish(1)
    FileSender(held, tmp_path).publish(1)
    reader = WeightReceiver([live.endpoint], wanted=shards_of([("w", served)]))
    stack.enter_context(reader)
    files = FileReceiver(tmp_path, wanted=shards_of([("w", served)]))
    for receiver, words in ((reader, "sender rank 0 sends"), (files, "the files have")):
        with pytest.raises(LayoutError, match=rf"w \[0:4\]: {kinds}{words} \w+; floating tensors"):
            receiver.stage(1)
        assert receiver.version is None
    assert served.float().eq(1).all()


@pytest.mark.parametrize(
    ("sent", "wanted"), [(torch.float64, torch.float8_e5m2), (torch.uint8, torch.int32)]
)
def test_floats_are_rounded_and_integers_made_wider(stack, sent, wanted):
    values = torch.tensor([0, 1, 2, 200]).to(sent)
    sender = stack.enter_context(WeightSender(shards_of([("w", values)])))
    sender.publish(1)
    served = torch.zeros(4).to(wanted)
    receiver = WeightReceiver([sender.endpoint], wanted=shards_of([("w", served)]))
    stack.enter_context(receiver)
    receiver.stage(1)
    receiver.commit()
    assert torch.equal(served.double(), values.to(wanted).double())


@pytest.mark.parametrize("name", ["int8", "float4_e2m1fn_x2", "float8_e8m0fnu", "bool"])
def test_a_wire_dtype_without_room_for_the_numbers_is_refused(name):
    for make in (SenderConfig, FileSenderConfig):
        with pytest.raises(LayoutError, match=f"floating tensors are not cast to '{name}'"):
            make(wire_dtype=name)
    with pytest.raises(LayoutError, match=f"not cast to '{name}'"):
        Cast(dtype=name)
