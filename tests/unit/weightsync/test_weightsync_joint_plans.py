"""What a group plans together is what it does: relays, and how much of a piece they wait for."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from cosmos_weightsync import (
    Box,
    Layout,
    Link,
    Links,
    ReceiverConfig,
    SenderConfig,
    ShardSpec,
    WeightDirectory,
    WeightReceiver,
    WeightSender,
    shards_of,
)
from cosmos_weightsync.boxes import subtract_all
from cosmos_weightsync.deadlines import Deadline
from cosmos_weightsync.joint_plans import JointPlan
from cosmos_weightsync.staging import Source
from cosmos_weightsync.transports import TcpTransport

MIB = 1 << 20
SLOW = Link(bytes_per_s=1e8, latency_s=1e-4)
LINKS = Links(rail=SLOW, network=SLOW)
SHAPE = (4096, 512)  # 8 MiB of float32.


def group(num_receivers: int, hosts: Sequence[str] = ()) -> list[JointPlan]:
    """The plan as each receiver makes it; one sender has everything."""
    spec = ShardSpec("w", SHAPE, Box.full(SHAPE), "float32")
    layout = Layout.from_ranks([[spec]])
    hosts = hosts or [f"host {rank}" for rank in range(num_receivers)]
    sender = Source("s", "sender", layout, "sender", 0, "home")
    receivers = [
        Source(f"r{rank}", f"receiver {rank}", layout, "receiver", rank, host)
        for rank, host in enumerate(hosts)
    ]
    return [JointPlan([sender], receivers, rank, LINKS) for rank in range(num_receivers)]


def test_without_a_relay_there_is_no_limit():
    (plan,) = group(1)
    assert plan.chunk_bytes is None
    ((_, wanted),) = plan.shares()
    assert [spec.box for spec in wanted.specs_of(0)] == [Box.full(SHAPE)]


def test_relays_take_pieces_of_a_chunk_and_the_last_takes_them_whole():
    plans = group(3)
    # 8 MiB take 84 ms; in chunks of 1 MiB the end of the chain is 2 * 10 ms later.
    assert [plan.chunk_bytes for plan in plans] == [MIB] * 3
    taken = {}
    for rank, plan in enumerate(plans):
        ((source, wanted),) = plan.shares()
        taken[source.name] = boxes = [spec.box for spec in wanted.specs_of(0)]
        assert subtract_all(Box.full(SHAPE), boxes) == ()
        assert sum(box.numel for box in boxes) == Box.full(SHAPE).numel
        is_last = rank == max(range(3), key=lambda other: depth(plans, other))
        assert [box.numel * 4 for box in boxes] == ([8 * MIB] if is_last else [MIB] * 8)
    assert len(taken) == 3  # Nobody feeds two.


def depth(plans: list[JointPlan], rank: int) -> int:
    ((source, _),) = plans[rank].shares()
    return 0 if source.role == "sender" else 1 + depth(plans, source.rank)


def test_neighbours_on_a_host_are_fed_by_chunks_too():
    plans = group(2, ["far away"] * 2)
    assert all(plan.chunk_bytes is not None for plan in plans)


class Largest:
    """TCP that remembers the largest message it sent."""

    name = "tcp"
    capabilities = TcpTransport().capabilities

    def __init__(self) -> None:
        self.num_bytes = 0

    def prepare(self, side, host):
        return _Pending(self, TcpTransport().prepare(side, host))


class _Pending:
    def __init__(self, largest: Largest, pending) -> None:
        self._largest, self._pending = largest, pending
        self.description, self.close = pending.description, pending.close

    def connect(self, peer, deadline):
        return _Channel(self._largest, self._pending.connect(peer, deadline))


class _Channel:
    def __init__(self, largest: Largest, channel) -> None:
        self._largest, self._channel = largest, channel
        self.device, self.capabilities = channel.device, channel.capabilities
        self.close, self.recv_into = channel.close, channel.recv_into

    def send(self, view, deadline) -> None:
        self._largest.num_bytes = max(self._largest.num_bytes, view.numel())
        self._channel.send(view, deadline)


def test_what_travels_is_what_was_planned(stack):
    """Messages of TCP's own size where nobody passes on; of a chunk where one does.

    The receivers do not know of each other at version 1, and do at version 2.
    """
    largest = Largest()
    directory = stack.enter_context(WeightDirectory(links=LINKS))
    model = {"w": torch.zeros(SHAPE), "norm": torch.zeros(5)}
    config = SenderConfig(directory=directory.endpoint, run_id="run")
    sender = stack.enter_context(
        WeightSender(shards_of(model.items()), config=config, transports=[largest])
    )
    sender.publish(1)
    receivers: list[WeightReceiver] = []
    for rank in range(2):
        config = ReceiverConfig(
            transport="tcp",
            directory=directory.endpoint,
            serve_host="127.0.0.1",
            prefer="planned",
            group="g",
            host=f"host {rank}",
        )
        wanted = shards_of({name: torch.zeros_like(t) for name, t in model.items()}.items())
        receiver = WeightReceiver(wanted=wanted, config=config, transports=[largest])
        receivers.append(stack.enter_context(receiver))
        receiver.stage(1)
        assert largest.num_bytes == Largest.capabilities.message_bytes == 8 * MIB
    for receiver in receivers:
        receiver._attendance.wait_for(
            lambda view: [m.version for m in view.members if m.layout].count(1) == 3,
            Deadline.after(60.0),
        )
    model["w"].copy_(torch.randn(SHAPE))
    sender.publish(2)
    largest.num_bytes = 0
    with ThreadPoolExecutor(2) as pool:
        for staged in [pool.submit(receiver.stage, 2) for receiver in receivers]:
            staged.result(120)
    for receiver in receivers:
        held = {shard.spec.name: shard.tensor for shard in receiver.staged_shards()}
        assert torch.equal(held["w"], model["w"])
    assert largest.num_bytes == pytest.approx(MIB, abs=4096)
