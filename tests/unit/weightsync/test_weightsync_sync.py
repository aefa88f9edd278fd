"""Senders and receivers over real sockets, in one process."""

import socket
import threading
from dataclasses import replace

import pytest
import torch

from cosmos_weightsync import (
    Box,
    ConfigurationError,
    DeadlineError,
    DigestError,
    LayoutError,
    PeerLostError,
    ProtocolError,
    ReceiverConfig,
    SenderConfig,
    Shard,
    ShardSpec,
    UnknownTensorError,
    VersionError,
    WeightReceiver,
    WeightSender,
    shards_of,
)
from cosmos_weightsync.deadlines import Deadline
from cosmos_weightsync.receiver_session import ReceiverSession
from cosmos_weightsync.transports import LocalTransport, TcpTransport

FULL = {
    "embed": (37, 16),
    "qkv": (48, 16),
    "norm": (16,),
    "scale": (),
    "experts": (3, 8, 16),
    "large": (600, 300),
}


@pytest.fixture
def trainer(make_trainer):
    return make_trainer(FULL)


def staged(receiver: WeightReceiver) -> dict[str, torch.Tensor]:
    return {shard.spec.name: shard.tensor for shard in receiver.staged_shards()}


def assert_same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor), name


def test_a_receiver_of_everything_gets_whole_tensors_in_senders_names(trainer, stack):
    wanted = trainer.publish(1)
    receiver = stack.enter_context(WeightReceiver(trainer.endpoints[::-1]))
    version = receiver.stage(1)
    trainer.step(99)
    assert (version.version, version.num_bytes) == (1, sum(t.nbytes for t in wanted.values()))
    assert_same(staged(receiver), wanted)


def test_versions_follow_one_another_into_the_same_memory(trainer, stack):
    trainer.publish(1)
    receiver = stack.enter_context(WeightReceiver(trainer.endpoints))
    receiver.stage(1)
    places = [shard.tensor.data_ptr() for shard in receiver.staged_shards()]
    for number in range(2, 6):
        wanted = trainer.publish(number)
        trainer.step(1000 + number)
        assert receiver.stage(number).version == number
        assert_same(staged(receiver), wanted)
    assert [shard.tensor.data_ptr() for shard in receiver.staged_shards()] == places


def test_commit_puts_a_version_into_the_targets_and_stage_does_not(trainer, stack):
    model = {name: torch.full(shape, -1.0) for name, shape in FULL.items()}
    receiver = stack.enter_context(
        WeightReceiver(trainer.endpoints, wanted=shards_of(model.items()))
    )
    wanted = trainer.publish(3)
    receiver.stage(3)
    assert all(tensor.eq(-1).all() for tensor in model.values())
    assert (receiver.version, receiver.commit(), receiver.version) == (None, 3, 3)
    assert_same(model, wanted)
    assert receiver.verify() == receiver.staged.digest


def test_only_the_wanted_boxes_travel(trainer, stack):
    columns = Box((10, 5), (45, 9))  # Columns from both ranks.
    spec = ShardSpec("qkv", FULL["qkv"], columns, "float32")
    wanted = trainer.publish(1)["qkv"][10:45, 5:9]
    receiver = stack.enter_context(WeightReceiver(trainer.endpoints, wanted=[spec]))
    assert receiver.stage().num_bytes == 35 * 4 * 4
    assert torch.equal(receiver.staged_shards()[0].tensor, wanted)


def test_senders_cast_once_and_receivers_cast_into_what_they_have(stack, make_trainer):
    trainer = make_trainer(FULL, config=SenderConfig(wire_dtype="bfloat16"))
    model = {name: torch.zeros(shape) for name, shape in FULL.items()}
    receiver = stack.enter_context(
        WeightReceiver(trainer.endpoints, wanted=shards_of(model.items()))
    )
    wanted = trainer.publish(1)
    assert receiver.stage(1).num_bytes == sum(t.nbytes for t in wanted.values()) // 2
    receiver.commit()
    assert_same(model, {name: t.bfloat16().float() for name, t in wanted.items()})
    receiver.verify()


@pytest.mark.parametrize("bucket_bytes", [1024, 5000, 16 << 20])
@pytest.mark.parametrize(
    "transport", ["tcp", "shared_memory", "cross_memory", "process_group", "local"]
)
def test_every_transport_and_bucket_size_gives_the_same_bytes(
    stack, transport, bucket_bytes, make_trainer
):
    local = LocalTransport()
    trainer = make_trainer(FULL, transports=[local])
    wanted = trainer.publish(1)
    config = ReceiverConfig(transport=transport, bucket_bytes=bucket_bytes)
    receiver = stack.enter_context(
        WeightReceiver(trainer.endpoints, config=config, transports=[local])
    )
    receiver.stage(1)
    assert_same(staged(receiver), wanted)


def test_senders_that_are_apart_still_give_one_version(trainer, stack):
    trainer.publish(1)
    wanted = trainer.step(2)
    trainer.senders[0].publish(2)  # Rank 1 is still at 1.
    receiver = stack.enter_context(WeightReceiver(trainer.endpoints))
    threading.Timer(0.2, lambda: trainer.senders[1].publish(2)).start()
    assert receiver.stage(1).version == 2
    assert_same(staged(receiver), wanted)


def test_publishing_while_receivers_stage_never_mixes_versions(trainer, stack):
    """Every element of version v has the value v: a mixture would show."""

    def publish_many() -> None:
        for version in range(1, 60):
            for sender in trainer.senders:
                for tensor in trainer.full.values():
                    tensor.fill_(version)
                sender.publish(version)

    publisher = threading.Thread(target=publish_many)
    receivers = [stack.enter_context(WeightReceiver(trainer.endpoints)) for _ in range(2)]
    publisher.start()
    seen: list[int] = []
    while publisher.is_alive():
        for receiver in receivers:
            version = receiver.stage().version
            assert all(tensor.eq(version).all() for tensor in staged(receiver).values())
            seen.append(version)
    publisher.join()
    assert seen == sorted(seen)


def test_a_version_being_read_survives_newer_ones(trainer, stack):
    """A receiver that has pinned version 1 gets it, though 2, 3 and 4 were published since."""
    trainer.publish(1)
    deadline = Deadline.after(20)
    session = ReceiverSession(trainer.endpoints[0], "", deadline)
    stack.callback(session.close)
    assert session.pin(1, "newest", deadline) == 1
    for version in (2, 3, 4):
        trainer.publish(version)
    receiver = stack.enter_context(WeightReceiver(trainer.endpoints))
    assert receiver.stage().version == 4
    assert trainer.senders[0].num_snapshots <= 3


def test_a_version_nobody_publishes_runs_out_and_the_next_stage_works(trainer, stack):
    wanted = trainer.publish(1)
    receiver = stack.enter_context(WeightReceiver(trainer.endpoints))
    with pytest.raises(DeadlineError, match="published no version 2 or newer"):
        receiver.stage(2, timeout_s=2.0)
    assert receiver.staged is None
    assert receiver.stage(1).version == 1
    assert_same(staged(receiver), wanted)


def test_a_receiver_outlives_hanging_up(trainer, stack):
    wanted = trainer.publish(1)
    receiver = stack.enter_context(WeightReceiver(trainer.endpoints))
    receiver.stage(1)
    receiver.close()
    receiver.stage(1)
    assert_same(staged(receiver), wanted)


def test_a_sender_that_hung_up_on_an_idle_receiver_is_called_again(stack, make_trainer):
    trainer = make_trainer(FULL, config=SenderConfig(idle_s=1.0))
    trainer.publish(1)
    receiver = stack.enter_context(WeightReceiver(trainer.endpoints))
    receiver.stage(1)
    threading.Event().wait(2.0)
    assert receiver.stage(1).version == 1


def test_a_closed_sender_is_named_and_the_old_weights_stay(trainer, stack):
    model = {name: torch.full(shape, -1.0) for name, shape in FULL.items()}
    receiver = stack.enter_context(
        WeightReceiver(trainer.endpoints, wanted=shards_of(model.items()))
    )
    wanted = trainer.publish(1)
    receiver.stage(1)
    receiver.commit()
    trainer.senders[1].close()
    with pytest.raises(PeerLostError, match=trainer.endpoints[1]):
        receiver.stage(1, timeout_s=5)
    assert receiver.version == 1
    assert_same(model, wanted)
    with pytest.raises(VersionError, match="nothing is staged"):
        receiver.commit()


def test_closing_a_sender_ends_its_threads(trainer, stack):
    trainer.publish(1)
    receiver = stack.enter_context(WeightReceiver(trainer.endpoints))
    receiver.stage(1)
    for sender in trainer.senders:
        sender.close()
        sender.close()
    assert not [t for t in threading.enumerate() if t.name.startswith("weight-s")]


def test_a_wrong_token_is_refused_and_the_right_one_is_not(stack, make_trainer):
    trainer = make_trainer(FULL, config=SenderConfig(token="secret"))
    trainer.publish(1)
    wrong = stack.enter_context(
        WeightReceiver(trainer.endpoints, config=ReceiverConfig(token="guess"))
    )
    with pytest.raises(ProtocolError, match="the token is not the sender's"):
        wrong.stage(1)
    right = WeightReceiver(trainer.endpoints, config=ReceiverConfig(token="secret"))
    assert stack.enter_context(right).stage(1).version == 1


@pytest.mark.parametrize("junk", [b"GET / HTTP/1.1\r\n\r\n", b"\x00\x00\x00\x02{}", b"\xff" * 9])
def test_strangers_on_the_port_do_no_harm(trainer, stack, junk):
    trainer.publish(1)
    host, _, port = trainer.endpoints[0].partition(":")
    with socket.create_connection((host, int(port))) as stranger:
        stranger.sendall(junk)
        receiver = stack.enter_context(WeightReceiver(trainer.endpoints))
        assert receiver.stage(1).version == 1


class _FlippingChannel:
    """A TCP channel that damages the last byte of every message it receives."""

    def __init__(self, channel) -> None:
        self._channel = channel
        self.device = channel.device
        self.capabilities = channel.capabilities
        self.close = channel.close

    def recv_into(self, view, deadline) -> None:
        self._channel.recv_into(view, deadline)
        view[-1] ^= 1


class _FlippingPending:
    def __init__(self, pending) -> None:
        self._pending = pending
        self.description = pending.description
        self.close = pending.close

    def connect(self, peer, deadline) -> _FlippingChannel:
        return _FlippingChannel(self._pending.connect(peer, deadline))


class _FlippingTransport:
    name = "tcp"
    capabilities = TcpTransport().capabilities

    def prepare(self, side, host) -> _FlippingPending:
        return _FlippingPending(TcpTransport().prepare(side, host))


def test_damaged_bytes_are_noticed(trainer, stack):
    trainer.publish(1)
    receiver = WeightReceiver(
        trainer.endpoints,
        config=ReceiverConfig(transport="tcp"),
        transports=[_FlippingTransport()],
    )
    stack.enter_context(receiver)
    with pytest.raises(DigestError, match=r"sender rank . sent checksum"):
        receiver.stage(1)
    assert receiver.staged is None


def test_verify_notices_memory_that_changed_since(trainer, stack):
    model = {name: torch.zeros(shape) for name, shape in FULL.items()}
    receiver = WeightReceiver(trainer.endpoints, wanted=shards_of(model.items()))
    stack.enter_context(receiver)
    trainer.publish(1)
    receiver.stage(1)
    receiver.commit()
    model["experts"][2, 0, 0] += 1
    with pytest.raises(DigestError, match="experts"):
        receiver.verify()


def test_equal_bytes_have_equal_digests_and_others_have_not(trainer, stack):
    trainer.publish(1)
    receivers = [stack.enter_context(WeightReceiver(trainer.endpoints)) for _ in range(2)]
    first = [receiver.stage(1).digest for receiver in receivers]
    trainer.publish(2)
    assert first[0] == first[1] != receivers[0].stage(2).digest


def test_a_tensor_the_senders_do_not_have_is_named(trainer, stack):
    spec = ShardSpec("head", (3, 2), Box.full((3, 2)), "float32")
    receiver = stack.enter_context(WeightReceiver(trainer.endpoints, wanted=[spec]))
    with pytest.raises(UnknownTensorError, match=r"head .*: wanted here, none of"):
        receiver.stage()


def test_specs_of_another_dtype_than_the_wire_are_refused(trainer, stack):
    spec = ShardSpec("norm", (16,), Box.full((16,)), "bfloat16")
    receiver = stack.enter_context(WeightReceiver(trainer.endpoints, wanted=[spec]))
    with pytest.raises(LayoutError, match=r"norm .*: wanted here as bfloat16, .* sends float32"):
        receiver.stage()


@pytest.mark.parametrize("chosen", [[0], [1], [0, 0], [0, 1, 1]])
def test_every_sender_rank_must_be_given_once(trainer, stack, chosen):
    receiver = WeightReceiver([trainer.endpoints[index] for index in chosen])
    stack.enter_context(receiver)
    with pytest.raises(ConfigurationError, match=r"the sender has ranks \[0, 1\]"):
        receiver.stage()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SenderConfig(bind_host="0.0.0.0"), "needs a token"),
        (lambda: SenderConfig(max_snapshots=1), "max_snapshots >= 2"),
        (lambda: WeightSender([], rank=2, num_ranks=2), "rank 2 is not one of 2"),
        (lambda: WeightSender([], config=SenderConfig(bind_host="192.0.2.1", token="t")), "listen"),
        (lambda: WeightReceiver([]), "every sender rank"),
        (lambda: WeightReceiver(["localhost"]), "host:port"),
        (
            lambda: WeightReceiver(["h:1"], config=ReceiverConfig(transport="pigeon")),
            "transport 'pigeon' is none of",
        ),
    ],
)
def test_what_cannot_work_is_refused_on_construction(make, message):
    with pytest.raises(ConfigurationError, match=message):
        make()


def test_nobody_at_the_endpoint_is_an_error_that_names_it():
    with socket.create_server(("127.0.0.1", 0)) as gone:
        endpoint = f"127.0.0.1:{gone.getsockname()[1]}"
    with pytest.raises(PeerLostError, match=f"{endpoint} cannot be reached"):
        WeightReceiver([endpoint]).stage()


def test_ranks_that_hold_nothing_of_what_is_wanted_take_no_part(stack):
    tensor = torch.arange(4.0)
    spec = ShardSpec("w", (4,), Box.full((4,)), "float32")
    idle = replace(spec, name="unwanted")
    senders = [
        stack.enter_context(WeightSender([Shard(item, tensor)], rank=rank, num_ranks=2))
        for rank, item in enumerate((spec, idle))
    ]
    for sender in senders:
        sender.publish(0)
    receiver = WeightReceiver([sender.endpoint for sender in senders], wanted=[spec])
    stack.enter_context(receiver).stage()
    assert receiver.staged_shards()[0].tensor.tolist() == [0.0, 1.0, 2.0, 3.0]


@pytest.mark.parametrize("mode", ["staged", "in_place"])
def test_a_rank_whose_shards_are_empty_follows_the_versions_of_the_others(stack, trainer, mode):
    wanted = [Shard(ShardSpec("norm", (16,), Box((16,), (16,)), "float32"), torch.zeros(0))]
    config = ReceiverConfig(mode=mode)
    receiver = stack.enter_context(WeightReceiver(trainer.endpoints, wanted=wanted, config=config))
    for version in (1, 2):
        trainer.publish(version)
        assert receiver.stage(version).num_bytes == 0
        assert receiver.commit() == receiver.version == version


def test_a_rank_whose_shards_are_empty_names_a_sender_that_is_not_there():
    with socket.create_server(("127.0.0.1", 0)) as gone:
        endpoint = f"127.0.0.1:{gone.getsockname()[1]}"
    with pytest.raises(PeerLostError, match=f"{endpoint} cannot be reached"):
        WeightReceiver([endpoint], wanted=[]).stage()
