"""What is left of a version when a holder of it goes: from another holder, and only that."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from cosmos_weightsync import (
    Box,
    DigestError,
    PeerLostError,
    ReceiverConfig,
    SenderConfig,
    ShardSpec,
    VersionError,
    WeightReceiver,
)
from cosmos_weightsync.transports import TcpTransport

SHAPES = {"embed": (64, 48), "wide": (32, 400), "norm": (16,), "scale": ()}


def weights(version: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(version)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def staged(receiver: WeightReceiver) -> dict[str, torch.Tensor]:
    return {shard.spec.name: shard.tensor for shard in receiver.staged_shards()}


def assert_same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor), name


class _Hooked:
    """TCP that calls a function before every message it sends."""

    name = "tcp"
    capabilities = TcpTransport().capabilities

    def __init__(self, before_send: Callable[[int, int], None], change=lambda view: view) -> None:
        self.before_send, self.change, self.count = before_send, change, 0

    def prepare(self, side, host):
        pending = TcpTransport().prepare(side, host)
        return pending if side == "receiver" else _HookedPending(self, pending)


class _HookedPending:
    def __init__(self, hooks: _Hooked, pending) -> None:
        self._hooks, self._pending = hooks, pending
        self.description, self.close = pending.description, pending.close

    def connect(self, peer, deadline):
        return _HookedChannel(self._hooks, self._pending.connect(peer, deadline))


class _HookedChannel:
    def __init__(self, hooks: _Hooked, channel) -> None:
        self._hooks, self._channel = hooks, channel
        self.device, self.close = channel.device, channel.close
        self.capabilities = channel.capabilities

    def send(self, view, deadline) -> None:
        self._hooks.count += 1
        self._hooks.before_send(self._hooks.count, view.numel())
        self._channel.send(self._hooks.change(view), deadline)


SMALL = ReceiverConfig(transport="tcp", bucket_bytes=2048, num_threads=4)


def test_a_dead_sender_is_replaced_by_its_duplicate_for_the_next_version(stack, make_trainer):
    trainer = make_trainer(SHAPES, replicas=2)
    receiver = stack.enter_context(WeightReceiver(trainer.endpoints))
    trainer.publish(1)
    receiver.stage(1)
    trainer.senders[0].close()
    trainer.senders[3].close()
    wanted = weights(2)
    for name, tensor in trainer.full.items():
        tensor.copy_(wanted[name])
    for rank in (1, 2):
        trainer.senders[rank].publish(2)
    assert receiver.stage(2).version == 2
    assert_same(staged(receiver), wanted)


def counting(counts: dict[int, int], rank: int) -> _Hooked:
    def count(_: int, size: int) -> None:
        counts[rank] = counts.get(rank, 0) + size

    return _Hooked(count)


def dying(after: int) -> _Hooked:
    """The first connection breaks when it is to send message ``after`` + 1, and all others do."""

    def die(count: int, _: int) -> None:
        if count > after:
            raise PeerLostError("killed by the test")

    return _Hooked(die)


@pytest.mark.parametrize("after", [0, 1, 2])
def test_a_sender_that_dies_in_the_middle_costs_only_what_it_had_left(stack, after, make_trainer):
    """Its duplicate sends what is missing; what arrived is checked and not sent again."""
    counts: dict[int, int] = {}
    hooks = {rank: counting(counts, rank) for rank in (1, 2, 3)}
    trainer = make_trainer(SHAPES, replicas=2, hooks={0: dying(after), **hooks})
    wanted = trainer.publish(1)
    receiver = stack.enter_context(WeightReceiver(trainer.endpoints, config=SMALL))
    receiver.stage(1)
    assert_same(staged(receiver), wanted)
    assert receiver.verify() == receiver.staged.digest
    total = sum(tensor.nbytes for tensor in wanted.values())
    padding = 64 * len(SHAPES)
    assert total - after * 1024 - padding <= sum(counts.values())
    assert sum(counts.values()) <= total - after * 512 + padding


def test_both_holders_of_a_region_dead_is_an_error_that_names_it_and_keeps_the_old_version(
    stack, make_trainer, make_part
):
    hooks = {rank: dying(3) for rank in (0, 2)}
    trainer = make_trainer(SHAPES, replicas=2, hooks=hooks)
    model = {name: torch.full(shape, -1.0) for name, shape in SHAPES.items()}
    items = [make_part(name, tensor, 0, 1) for name, tensor in model.items()]
    receiver = stack.enter_context(WeightReceiver(trainer.endpoints, wanted=items, config=SMALL))
    trainer.publish(1)
    with pytest.raises(PeerLostError, match=r"sender rank [02] .* nobody else .* version 1"):
        receiver.stage(1, timeout_s=30)
    assert receiver.version is None
    assert all(tensor.eq(-1).all() for tensor in model.values())


def test_damage_on_one_edge_is_made_good_by_a_duplicate(stack, make_trainer):
    def damage(view: torch.Tensor) -> torch.Tensor:
        spoiled = view.clone()
        spoiled[-1] ^= 1
        return spoiled

    trainer = make_trainer(SHAPES, replicas=2, hooks={0: _Hooked(lambda *_: None, damage)})
    wanted = trainer.publish(1)
    receiver = stack.enter_context(WeightReceiver(trainer.endpoints, config=SMALL))
    receiver.stage(1)
    assert_same(staged(receiver), wanted)


def test_damage_without_a_duplicate_is_named(stack, make_trainer):
    def damage(view: torch.Tensor) -> torch.Tensor:
        return view ^ 1

    trainer = make_trainer(SHAPES, hooks={1: _Hooked(lambda *_: None, damage)})
    trainer.publish(1)
    receiver = stack.enter_context(WeightReceiver(trainer.endpoints, config=SMALL))
    with pytest.raises(DigestError, match=r"sender rank 1 .*sent checksum"):
        receiver.stage(1)
    assert receiver.staged is None


def test_ranks_of_two_runs_are_never_mixed(stack, make_trainer):
    trainer = make_trainer(SHAPES, replicas=2, config=SenderConfig(run_id="a"))
    other = make_trainer(SHAPES, replicas=2, config=SenderConfig(run_id="b"))
    trainer.publish(1)
    other.publish(1)
    mixed = [trainer.endpoints[0], other.endpoints[1]]
    receiver = WeightReceiver([*mixed, trainer.endpoints[2], other.endpoints[3]])
    stack.enter_context(receiver)
    with pytest.raises(VersionError, match="version 1 is of several runs"):
        receiver.stage(1)


SERVING = ReceiverConfig(transport="tcp", bucket_bytes=2048, serve_host="127.0.0.1")


def test_a_newcomer_with_another_cut_catches_up_from_committed_receivers(
    stack, make_trainer, make_part
):
    """Two receivers hold rows; the senders are gone; the newcomer wants columns."""
    trainer = make_trainer(SHAPES, replicas=2)
    wanted = trainer.publish(1)
    holders = []
    for index in range(2):
        model = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
        items = [make_part(name, tensor, index, 2) for name, tensor in model.items()]
        receiver = WeightReceiver(trainer.endpoints, wanted=items, config=SERVING)
        holders.append(stack.enter_context(receiver))
        receiver.stage(1)
        receiver.commit()
    for sender in trainer.senders:
        sender.close()
    columns = Box((10, 7), (60, 29))
    spec = ShardSpec("embed", SHAPES["embed"], columns, "float32")
    newcomer = WeightReceiver([holder.endpoint for holder in holders], wanted=[spec], config=SMALL)
    stack.enter_context(newcomer)
    assert newcomer.stage().version == 1
    assert torch.equal(newcomer.staged_shards()[0].tensor, wanted["embed"][10:60, 7:29])
    newcomer.verify()


def test_a_sender_that_dies_is_replaced_by_a_receiver_that_has_the_version(stack, make_trainer):
    trainer = make_trainer(SHAPES)
    wanted = trainer.publish(1)
    first = stack.enter_context(WeightReceiver(trainer.endpoints, config=SERVING))
    first.stage(1)
    trainer.senders[0].close()
    endpoints = [*trainer.endpoints, first.endpoint]
    specs = [shard.spec for shard in first.staged_shards()]
    second = WeightReceiver(endpoints, wanted=specs, config=SMALL)
    stack.enter_context(second)
    second.stage(1)
    assert_same(staged(second), wanted)


class _Gate(_Hooked):
    """Lets so many messages pass, then waits to be opened."""

    def __init__(self, free: int) -> None:
        self.opened, self.free, self.reached = threading.Event(), free, threading.Event()
        super().__init__(self._wait)

    def _wait(self, count: int, _: int) -> None:
        if count > self.free:
            self.reached.set()
            assert self.opened.wait(30)


def test_a_relay_forwards_what_it_has_while_the_rest_arrives(stack, make_trainer):
    """The second hop has bytes in place while the first is held up half-way."""
    gate = _Gate(10)
    trainer = make_trainer(SHAPES, hooks={1: gate})
    wanted = trainer.publish(1)
    relay = stack.enter_context(WeightReceiver(trainer.endpoints, config=SERVING))
    last = stack.enter_context(WeightReceiver([relay.endpoint], config=SMALL))
    pool = stack.enter_context(ThreadPoolExecutor(2))
    first_hop = pool.submit(relay.stage, 1)
    assert gate.reached.wait(30)
    second_hop = pool.submit(last.stage, 1)
    give_up = time.monotonic() + 30
    while last.arrived_bytes < 6000:
        assert time.monotonic() < give_up
        time.sleep(0.01)
    assert not first_hop.done()
    assert not second_hop.done()
    gate.opened.set()
    assert first_hop.result(30).version == second_hop.result(30).version == 1
    assert_same(staged(last), wanted)


def test_a_relay_that_dies_half_way_is_replaced_by_the_senders(stack, make_trainer):
    gate = _Gate(10)
    trainer = make_trainer(SHAPES, hooks={1: gate})
    wanted = trainer.publish(1)
    relay = stack.enter_context(WeightReceiver(trainer.endpoints, config=SERVING))
    last = WeightReceiver([relay.endpoint, *trainer.endpoints], config=SMALL)
    stack.enter_context(last)
    pool = stack.enter_context(ThreadPoolExecutor(2))
    first_hop = pool.submit(relay.stage, 1)
    assert gate.reached.wait(30)
    second_hop = pool.submit(last.stage, 1)
    time.sleep(0.2)
    relay.close()
    gate.opened.set()
    with pytest.raises(PeerLostError):
        first_hop.result(30)
    assert second_hop.result(30).version == 1
    assert_same(staged(last), wanted)


def test_a_relay_that_moves_on_hangs_up_on_a_slow_reader_who_gets_the_rest_elsewhere(
    stack, make_trainer
):
    """The reader of version 1 is cut off by version 2 and gets one of the two, whole."""
    trainer = make_trainer(SHAPES)
    gate = _Gate(10)
    first, second = trainer.publish(1), weights(2)
    relay = WeightReceiver(
        trainer.endpoints, config=replace(SERVING, linger_s=0.1), transports=[gate]
    )
    stack.enter_context(relay)
    relay.stage(1)
    reader = stack.enter_context(WeightReceiver([relay.endpoint, *trainer.endpoints], config=SMALL))
    pool = stack.enter_context(ThreadPoolExecutor(1))
    reading = pool.submit(reader.stage, 1)
    assert gate.reached.wait(30)
    trainer.publish(2)
    relay.stage(2)
    gate.opened.set()
    version = reading.result(30).version
    assert_same(staged(reader), {1: first, 2: second}[version])
    assert_same(staged(relay), second)


def test_a_version_is_verified_by_what_was_sent_when_the_receiver_that_gave_it_lost_it(
    stack, make_trainer
):
    is_dead = threading.Event()

    def die(_: int, __: int) -> None:
        if is_dead.is_set():
            raise PeerLostError("killed by the test")

    trainer = make_trainer(SHAPES, hooks={rank: _Hooked(die) for rank in range(2)})
    trainer.publish(1)
    relay = stack.enter_context(WeightReceiver(trainer.endpoints, config=SERVING))
    relay.stage(1)
    config = replace(SMALL, stall_s=0.5)
    reader = stack.enter_context(WeightReceiver([relay.endpoint], config=config))
    digest = reader.stage(1).digest
    trainer.publish(2)
    is_dead.set()
    with pytest.raises(PeerLostError):
        relay.stage(2, timeout_s=30)
    assert reader.verify(timeout_s=10.0) == digest


CUTS = {"all rows": Box.full((64, 48)), "some columns": Box((8, 3), (60, 40))}


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("transport", ["tcp", "shared_memory"])
def test_memory_of_a_receiver_that_changes_after_the_version_came_is_passed_on_to_nobody(
    stack, make_trainer, cut, transport
):
    trainer = make_trainer(SHAPES)
    wanted = trainer.publish(1)["embed"]
    reading = replace(SMALL, transport=transport)
    damaged, whole = (WeightReceiver(trainer.endpoints, config=SERVING) for _ in range(2))
    for holder in (damaged, whole):
        stack.enter_context(holder).stage(1)
    for sender in trainer.senders:
        sender.close()
    staged(damaged)["embed"][40, 7:8].view(torch.int32).bitwise_xor_(1)
    spec = ShardSpec("embed", SHAPES["embed"], CUTS[cut], "float32")
    alone = WeightReceiver([damaged.endpoint], wanted=[spec], config=reading)
    stack.enter_context(alone)
    with pytest.raises(
        DigestError, match=r"embed \[.*(sent checksum|has changed since it was wri)"
    ):
        alone.stage(1, timeout_s=30)
    assert (alone.version, alone.staged) == (None, None)
    both = WeightReceiver([damaged.endpoint, whole.endpoint], wanted=[spec], config=reading)
    stack.enter_context(both).stage(1, timeout_s=30)
    assert staged(both)["embed"].equal(wanted[CUTS[cut].relative_to(Box.full((64, 48)))])
