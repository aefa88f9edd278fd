"""Receivers that join, cut otherwise than those there are, while a trainer publishes on and on."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial

import pytest
import torch

from cosmos_weightsync import (
    Box,
    PlanError,
    ReceiverConfig,
    SenderConfig,
    Shard,
    ShardSpec,
    TransferError,
    WeightDirectory,
    WeightReceiver,
    WeightSender,
)
from cosmos_weightsync.attendance import Attendance
from cosmos_weightsync.deadlines import Deadline
from cosmos_weightsync.membership import Member, View
from cosmos_weightsync.transports import TcpTransport

SHAPE = (48, 60)


class Watched(TcpTransport):
    """TCP that counts for how many readers a sender has opened it."""

    num_opened = 0

    def prepare(self, side, host):
        self.num_opened += side == "sender"
        return super().prepare(side, host)


def columns(rank: int, num_ranks: int) -> Box:
    width = SHAPE[1] // num_ranks
    return Box((0, rank * width), (SHAPE[0], (rank + 1) * width))


def rows(rank: int, num_ranks: int) -> Box:
    height = SHAPE[0] // num_ranks
    return Box((rank * height, 0), ((rank + 1) * height, SHAPE[1]))


def shard(box: Box) -> Shard:
    return Shard(ShardSpec("w", SHAPE, box, "float32"), torch.zeros(box.shape))


def again(stop: threading.Event, step: Callable[[], object]) -> int:
    """Until told to stop; returns how often."""
    count = 0
    while not stop.is_set():
        step()
        count += 1
    return count


class World:
    """Two trainer ranks that hold rows, and two receivers of columns that serve what they have."""

    def __init__(self, stack: ExitStack) -> None:
        self.directory = stack.enter_context(WeightDirectory()).endpoint
        self.watched, self._version = Watched(), 0
        self._trained = [shard(rows(rank, 2)) for rank in range(2)]
        self._senders = [
            stack.enter_context(
                WeightSender(
                    [held],
                    rank=rank,
                    num_ranks=2,
                    config=SenderConfig(directory=self.directory, run_id="run"),
                    transports=[self.watched],
                )
            )
            for rank, held in enumerate(self._trained)
        ]
        halves = [[shard(columns(rank, 2))] for rank in range(2)]
        self.receivers = [
            stack.enter_context(self.receiver(half, "shared_memory", "senders")) for half in halves
        ]

    def receiver(
        self, wanted: list[Shard] | None, transport: str, prefer: str, **more: float
    ) -> WeightReceiver:
        how = {"transport": transport, "prefer": prefer, "serve_host": "127.0.0.1", **more}
        config = ReceiverConfig(directory=self.directory, linger_s=20.0, **how)
        return WeightReceiver(wanted=wanted, config=config)

    def apart(self) -> None:
        """The first receiver has version 2, the second version 1, and the directory says so."""
        self.publish()
        for receiver in self.receivers:
            update(receiver)
        self.publish()
        update(self.receivers[0])
        told, onlooker = Deadline.after(60), Member(id="onlooker", role="receiver")
        attendance = Attendance(self.directory, onlooker, "")
        attendance.wait_for(lambda view: have(view) == [1, 2], told)
        attendance.close(told)

    def end(self) -> None:
        """The trainer is gone."""
        for sender in self._senders:
            sender.close()

    def publish(self) -> None:
        """Version v is the number v in every element."""
        self._version += 1
        for held, sender in zip(self._trained, self._senders, strict=True):
            held.tensor.fill_(self._version)
            sender.publish(self._version)
        time.sleep(0.01)


def have(view: View) -> list[int]:
    """The versions of receivers."""
    return sorted(m.version for m in view.members if m.role == "receiver" and m.version >= 0)


def update(receiver: WeightReceiver) -> None:
    newest = receiver.version or 0
    receiver.stage(newest + 1, timeout_s=60)
    receiver.commit()


def test_newcomers_of_other_degrees_catch_up_from_receivers_while_training_goes_on(stack):
    world, stop, end = World(stack), threading.Event(), threading.Event()
    threads = stack.enter_context(ThreadPoolExecutor(4))
    stack.callback(end.set)
    stack.callback(stop.set)
    world.publish()
    for receiver in world.receivers:
        update(receiver)
    training = threads.submit(again, end, world.publish)
    at_work = [threads.submit(again, stop, partial(update, each)) for each in world.receivers]
    seen = []
    for num_ranks in (3, 1, 4):
        for rank in range(num_ranks):
            held = shard(rows(rank, num_ranks))
            with world.receiver([held], "tcp", "receivers") as newcomer:
                seen.append(newcomer.stage(timeout_s=60).version)
                assert newcomer.commit() == newcomer.version == seen[-1]
                assert held.tensor.eq(seen[-1]).all()
                newcomer.verify()
    stop.set()
    assert all(each.result(60) > 3 for each in at_work)
    end.set()  # Not sooner: each waits for one more version.
    assert training.result(60) > 3
    assert seen == sorted(seen)
    assert seen[-1] > seen[0]
    assert world.watched.num_opened == 0  # No newcomer read from a trainer.


@pytest.mark.parametrize("wants", ["its rows", "everything"])
def test_a_newcomer_waits_for_the_receiver_that_is_a_version_behind(stack, wants):
    world = World(stack)
    world.apart()
    wanted = None if wants == "everything" else [shard(rows(1, 3))]
    newcomer = stack.enter_context(world.receiver(wanted, "tcp", "receivers"))
    threads = stack.enter_context(ThreadPoolExecutor(1))
    staging = threads.submit(newcomer.stage, timeout_s=60)
    time.sleep(0.3)
    assert not staging.done()
    update(world.receivers[1])
    assert staging.result(60).version == 2
    (arrived,) = newcomer.staged_shards()
    assert arrived.spec.box == (rows(0, 1) if wanted is None else rows(1, 3))
    assert arrived.tensor.eq(2).all()
    assert world.watched.num_opened == 0


def test_a_newcomer_does_not_wait_longer_for_one_that_stays_behind_than_for_the_silent(stack):
    world = World(stack)
    world.apart()
    newcomer = world.receiver([shard(rows(1, 3))], "tcp", "receivers", stall_s=0.5)
    stack.enter_context(newcomer)
    assert newcomer.stage(timeout_s=60).version == 2
    assert newcomer.staged_shards()[0].tensor.eq(2).all()
    assert world.watched.num_opened > 0  # The trainer had what was missing.


def test_halves_of_two_versions_make_none(stack):
    world = World(stack)
    world.apart()
    world.end()
    newcomer = world.receiver([shard(rows(1, 3))], "tcp", "receivers", stall_s=0.5)
    stack.enter_context(newcomer)
    with pytest.raises((PlanError, TransferError)):
        newcomer.stage(timeout_s=5)
    assert (newcomer.version, newcomer.staged) == (None, None)
