"""Receivers that wait for a version wait for whoever will have it, and not for one another."""

import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from typing import Any, Literal

import pytest
import torch

from cosmos_weightsync import (
    Box,
    DeadlineError,
    Layout,
    PeerLostError,
    ReceiverConfig,
    SenderConfig,
    ShardSpec,
    WeightDirectory,
    WeightReceiver,
    WeightSender,
    shards_of,
)
from cosmos_weightsync.attendance import Attendance
from cosmos_weightsync.deadlines import Deadline
from cosmos_weightsync.frames import connect_control
from cosmos_weightsync.gathering import DirectorySources
from cosmos_weightsync.membership import Member


class World:
    """A directory, and whoever registers with it."""

    def __init__(self, stack: ExitStack) -> None:
        self.stack = stack
        self.directory = stack.enter_context(WeightDirectory())
        self.threads = stack.enter_context(ThreadPoolExecutor(4))

    def sender(self) -> WeightSender:
        config = SenderConfig(directory=self.directory.endpoint)
        return self.stack.enter_context(
            WeightSender(shards_of([("w", torch.ones(4))]), config=config)
        )

    def receiver(self, **more: Any) -> WeightReceiver:
        config = ReceiverConfig(
            directory=self.directory.endpoint, serve_host="127.0.0.1", transport="tcp", **more
        )
        return self.stack.enter_context(WeightReceiver(config=config))


@pytest.fixture
def world() -> Iterator[World]:
    with ExitStack() as stack:
        yield World(stack)


@pytest.mark.parametrize("waiting", [1, 2])
@pytest.mark.parametrize("prefer", ["senders", "receivers"])
def test_a_trainer_that_comes_back_ends_the_wait_of_all(world, prefer, waiting):
    sender = world.sender()
    receivers = [world.receiver(prefer=prefer) for _ in range(2)]
    sender.publish(1)
    for receiver in receivers:
        receiver.stage(1)
    sender.close()
    staged = [world.threads.submit(r.stage, 2, timeout_s=60) for r in receivers[:waiting]]
    time.sleep(0.3)
    world.sender().publish(2)
    assert [future.result(30).version for future in staged] == [2] * waiting


def test_receivers_that_prefer_receivers_take_a_new_version_from_the_sender(world):
    sender = world.sender()
    receivers = [world.receiver(prefer="receivers") for _ in range(2)]
    for version in (1, 2):
        sender.publish(version)
        staged = [world.threads.submit(r.stage, version, timeout_s=60) for r in receivers]
        assert [future.result(30).version for future in staged] == [version] * 2


def test_who_took_a_version_from_a_receiver_takes_the_next_from_the_sender(world):
    sender = world.sender()
    sender.publish(1)
    world.receiver().stage(1)
    sender.close()
    newcomer = world.receiver()
    newcomer.stage(1)
    world.sender().publish(2)
    assert newcomer.stage(2, timeout_s=30).version == 2


def test_a_wait_for_a_trainer_that_stays_away_says_so(world):
    sender = world.sender()
    sender.publish(1)
    world.receiver().stage(1)
    sender.close()
    with pytest.raises(DeadlineError, match="version 2: no sender is in the directory"):
        world.receiver().stage(2, timeout_s=0.5)


def attend(world: World, member: str, role: Literal["sender", "receiver"], port: int) -> Attendance:
    name = f"127.0.0.1:{port}"
    who = Member(id=member, role=role, name=member, endpoint=name)
    attendance = Attendance(world.directory.endpoint, who, "")
    world.stack.callback(attendance.close, Deadline.after(20))
    attendance.describe(Layout.from_ranks([[]]))
    attendance.hold(1, "")
    return attendance


@pytest.mark.parametrize("prefer", ["senders", "receivers"])
def test_a_sender_that_is_gone_before_the_directory_says_so_is_waited_for(world, prefer):
    """It hangs up a moment before the word of its leaving arrives."""
    mine = attend(world, "mine", "receiver", 9)
    sources = DirectorySources(mine, prefer, find_timeout_s=20)
    attend(world, "before", "sender", 10)
    mine.wait_for(lambda view: len(view.members) == 2, Deadline.after(20))
    sources.suspect("127.0.0.1:10", PeerLostError("gone"))
    with pytest.raises(DeadlineError):
        sources.find(1, Deadline.after(0.3))
    attend(world, "again", "sender", 11)
    assert [s.name for s in sources.find(1, Deadline.after(20)).sources] == ["again"]


def test_a_sender_whose_lease_is_over_is_waited_for_until_it_is_back(world):
    """One that is busy for longer than its lease registers again as soon as it learns of it."""
    directory = world.stack.enter_context(WeightDirectory(lease_s=2.0))
    mine = Attendance(directory.endpoint, Member(id="mine", role="receiver"), "")
    world.stack.callback(mine.close, Deadline.after(60))
    weights = ShardSpec("w", (4,), Box((0,), (4,)), "float32")
    layout = Layout.from_ranks([[weights]])
    late = Member(id="late", role="sender", endpoint="127.0.0.1:10", layout=layout.digest())
    with closing(connect_control(directory.endpoint, Deadline.after(20))) as words:
        words.send("hello", {"token": ""}, Deadline.after(20))
        joining = {"member": late.to_json(), "layout": layout.to_json()}
        words.send("join", joining, Deadline.after(20))
        words.receive(Deadline.after(20), expect="view")
        mine.wait_for(lambda view: len(view.members) == 2, Deadline.after(20))
        while len(directory.view.members) == 2:
            time.sleep(0.001)  # Most times `mine` is not told yet when it asks.
        sources = DirectorySources(mine, "senders", find_timeout_s=20)
        finding = world.threads.submit(sources.find, 1, Deadline.after(20))
        time.sleep(0.5)
        assert not finding.done()
        words.send("join", joining, Deadline.after(20))
        found = finding.result(20)
    assert [source.endpoint for source in found.sources] == ["127.0.0.1:10"]
    assert not found.unreachable


def test_whoever_listens_where_a_dead_sender_did_is_not_taken_for_dead(world):
    """A trainer that starts again may be given the port that it had."""
    mine = attend(world, "mine", "receiver", 9)
    sources = DirectorySources(mine, "senders", find_timeout_s=20)
    attend(world, "before", "sender", 10).close(Deadline.after(20))
    attend(world, "dead", "sender", 10)
    mine.wait_for(lambda view: {m.id for m in view.members} == {"mine", "dead"}, Deadline.after(20))
    assert [s.name for s in sources.find(1, Deadline.after(20)).sources] == ["dead"]
    sources.suspect("127.0.0.1:10", PeerLostError("gone"))
    with pytest.raises(DeadlineError):
        sources.find(1, Deadline.after(0.3))
    attend(world, "again", "sender", 10)
    assert [s.name for s in sources.find(1, Deadline.after(20)).sources] == ["again"]


def test_a_sender_that_hangs_is_given_up_for_a_receiver_that_has_the_version(world):
    """It still listens, and the directory still counts on it."""
    sender = world.sender()
    sender.publish(1)
    world.receiver().stage(1)
    layout, run_id = sender.layout, sender.run_id
    sender.close()
    hanging = world.stack.enter_context(socket.create_server(("127.0.0.1", 0)))
    endpoint = f"127.0.0.1:{hanging.getsockname()[1]}"
    who = Member(id="hangs", role="sender", name="hangs", endpoint=endpoint, run_id=run_id)
    attendance = Attendance(world.directory.endpoint, who, "")
    world.stack.callback(attendance.close, Deadline.after(20))
    attendance.describe(layout)
    attendance.hold(1, run_id)
    newcomer = world.receiver(connect_timeout_s=0.5)
    attendance.wait_for(lambda view: len(view.members) == 3, Deadline.after(20))
    assert newcomer.stage(1, timeout_s=30).version == 1


def test_a_sender_that_hangs_later_is_not_waited_for_to_say_what_it_has(world):
    """Its lock is held: it does not get so far as to answer, or to hang up."""
    sender = world.sender()
    sender.publish(1)
    first, second = world.receiver(stall_s=0.5), world.receiver(stall_s=0.5)
    digests = [receiver.stage(1).digest for receiver in (first, second)]
    with sender._snapshots._changed:
        assert first.verify(timeout_s=30) == digests[0]  # By what came with the version.
        assert second.stage(1, timeout_s=30).version == 1


def test_a_receiver_that_lost_what_it_had_is_not_waited_for(world):
    """The directory hears of it when its next version is there; it may wait for this one's."""
    sender = world.sender()
    sender.publish(7)
    silent = world.stack.enter_context(WeightSender(shards_of([("w", torch.ones(4))])))
    waiting = world.stack.enter_context(
        WeightReceiver([silent.endpoint], config=ReceiverConfig(serve_host="127.0.0.1"))
    )
    staged = world.threads.submit(waiting.stage, 6)
    who = Member(id="waiting", role="receiver", name="waiting", endpoint=waiting.endpoint)
    attendance = Attendance(world.directory.endpoint, who, "")
    world.stack.callback(attendance.close, Deadline.after(20))
    attendance.describe(sender.layout)
    attendance.hold(5, sender.run_id)
    config = ReceiverConfig(directory=world.directory.endpoint, prefer="receivers", stall_s=0.5)
    receiver = world.stack.enter_context(WeightReceiver(config=config))
    assert receiver.stage(5, timeout_s=20.0).version == 7
    silent.close()
    with pytest.raises(PeerLostError):
        staged.result(20)


def test_a_receiver_is_not_waited_for_to_have_what_another_has(world):
    """Both were said to have version 1; one has gone on to the next, and the other does nothing."""
    config = SenderConfig(directory=world.directory.endpoint)
    tensors = [("w", torch.ones(4)), ("v", torch.ones(4))]
    sender = world.stack.enter_context(WeightSender(shards_of(tensors), config=config))
    sender.publish(1)
    receivers = [
        world.stack.enter_context(
            WeightReceiver([sender.endpoint], config=ReceiverConfig(serve_host="127.0.0.1"))
        )
        for _ in range(2)
    ]
    for number, receiver in enumerate(receivers):
        receiver.stage(1)
        name = f"receiver {number}"
        who = Member(id=name, role="receiver", name=name, endpoint=receiver.endpoint)
        attendance = Attendance(world.directory.endpoint, who, "")
        world.stack.callback(attendance.close, Deadline.after(20))
        attendance.describe(sender.layout)
        attendance.hold(1, sender.run_id)
    sender.publish(2)
    receivers[0].stage(2)
    config = ReceiverConfig(directory=world.directory.endpoint, prefer="receivers", stall_s=0.5)
    newcomer = world.stack.enter_context(WeightReceiver(config=config))
    assert newcomer.stage(1, timeout_s=20.0).version == 2


def _left_by_their_trainer(world: World) -> list[WeightReceiver]:
    """Two receivers that have version 1, and nobody else does."""
    sender = world.sender()
    receivers = [world.receiver(), world.receiver()]
    sender.publish(1)
    for receiver in receivers:
        receiver.stage(1)
    sender.close()
    return receivers


def test_receivers_do_not_take_from_one_another_what_they_have(world):
    receivers = _left_by_their_trainer(world)

    def again(receiver: WeightReceiver) -> list[tuple[int, int]]:
        found = [receiver.stage(timeout_s=20.0) for _ in range(100)]
        return [(staged.version, staged.wire_bytes) for staged in found]

    for found in world.threads.map(again, receivers):
        assert found == [(1, 0)] * 100
    assert [receiver.verify() for receiver in receivers] == [receivers[0].staged.digest] * 2
    newcomer = world.receiver()
    assert newcomer.stage(1).version == 1


def test_what_is_not_what_came_is_taken_from_another_receiver(world):
    damaged, _ = _left_by_their_trainer(world)
    (shard,) = damaged.staged_shards()
    shard.tensor[2] = 7.0
    assert damaged.stage(1).wire_bytes == 16
    (shard,) = damaged.staged_shards()
    assert shard.tensor.tolist() == [1.0] * 4
