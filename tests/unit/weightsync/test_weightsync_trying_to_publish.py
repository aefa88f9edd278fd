"""A trainer that waits for no receiver: versions are skipped, and named who was in the way."""

import threading
import time
from collections.abc import Callable
from contextlib import ExitStack

import pytest
import torch

from cosmos_weightsync import (
    ConfigurationError,
    DeadlineError,
    PeerLostError,
    SenderConfig,
    VersionError,
    WeightReceiver,
)
from cosmos_weightsync.deadlines import Deadline
from cosmos_weightsync.receiver_session import ReceiverSession

SHAPES = {"w": (8, 4)}


def slow_reader(stack: ExitStack, endpoint: str, version: int) -> ReceiverSession:
    """Somebody who begins to read a version and does not go on."""
    deadline = Deadline.after(20)
    session = ReceiverSession(endpoint, "", deadline)
    stack.callback(session.close)
    assert session.pin(version, "newest", deadline) == version
    return session


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20.0
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_version_is_skipped_at_once_where_receivers_read_all_others(stack, make_trainer):
    trainer = make_trainer(SHAPES, config=SenderConfig(max_snapshots=2))
    sender = trainer.senders[0]
    for version in (1, 2):
        trainer.publish(version)
        slow_reader(stack, sender.endpoint, version)
    trainer.step(3)
    began = time.perf_counter()
    skipped = sender.try_publish(3)
    assert time.perf_counter() - began < 1.0
    assert not skipped.is_published
    assert skipped.readers == (
        "version 1 by receiver at 127.0.0.1",
        "version 2 by receiver at 127.0.0.1",
    )
    assert sender.newest_version == 2


def test_a_skipped_version_or_a_newer_one_is_published_when_a_receiver_is_done(stack, make_trainer):
    trainer = make_trainer(SHAPES, config=SenderConfig(max_snapshots=2))
    readers = []
    for version in (1, 2):
        trainer.publish(version)
        readers.append([slow_reader(stack, each.endpoint, version) for each in trainer.senders])
    assert not any(sender.try_publish(3).is_published for sender in trainer.senders)
    wanted = trainer.step(5)
    for session in readers[0]:
        session.close()
    for sender in trainer.senders:
        until(lambda sender=sender: sender.try_publish(5).is_published)
    receiver = stack.enter_context(WeightReceiver(trainer.endpoints))
    assert receiver.stage().version == 5
    (shard,) = receiver.staged_shards()
    assert torch.equal(shard.tensor, wanted["w"])


def test_ranks_agree_so_that_none_publishes_what_another_skips(stack, make_trainer):
    trainer = make_trainer(SHAPES, config=SenderConfig(max_snapshots=2))
    first, second = trainer.senders
    for version in (1, 2):
        trainer.publish(version)
        slow_reader(stack, second.endpoint, version)
    met, said = threading.Barrier(2), {}

    def agree_as(rank: int) -> Callable[[bool], bool]:
        def agree(is_free: bool) -> bool:
            said[rank] = is_free
            met.wait(20)
            return all(said.values())

        return agree

    found = {}

    def publish(rank: int) -> None:
        found[rank] = trainer.senders[rank].try_publish(3, agree=agree_as(rank))

    threads = [threading.Thread(target=publish, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert said == {0: True, 1: False}
    assert [found[rank].is_published for rank in range(2)] == [False, False]
    assert [len(found[rank].readers) for rank in range(2)] == [0, 2]
    assert (first.newest_version, second.newest_version) == (2, 2)
    receiver = stack.enter_context(WeightReceiver(trainer.endpoints))
    assert receiver.stage().version == 2


def test_ranks_that_cannot_agree_have_what_they_had(stack, make_trainer):
    trainer = make_trainer(SHAPES, config=SenderConfig(max_snapshots=2))
    trainer.publish(1)
    trainer.publish(2)

    def broken(_: bool) -> bool:
        raise RuntimeError("a rank has died")

    for sender in trainer.senders:
        with pytest.raises(RuntimeError, match="a rank has died"):
            sender.try_publish(3, agree=broken)
        assert sender.newest_version == 2
    wanted = trainer.publish(3)
    receiver = stack.enter_context(WeightReceiver(trainer.endpoints))
    assert receiver.stage().version == 3
    assert torch.equal(receiver.staged_shards()[0].tensor, wanted["w"])


def test_a_version_that_was_published_is_not_tried_again(make_trainer):
    trainer = make_trainer(SHAPES)
    trainer.publish(3)
    with pytest.raises(VersionError, match="version 3 comes after version 3"):
        trainer.senders[0].try_publish(3)


def test_who_waits_gives_up_and_names_the_receivers(stack, make_trainer):
    config = SenderConfig(max_snapshots=2, publish_timeout_s=0.2)
    trainer = make_trainer(SHAPES, config=config)
    for version in (1, 2):
        trainer.publish(version)
        slow_reader(stack, trainer.endpoints[0], version)
    with pytest.raises(DeadlineError, match=r"read versions \[1, 2\]: receiver at 127\.0\.0\.1$"):
        trainer.senders[0].publish(3)


def test_a_receiver_that_reads_for_too_long_is_hung_up_on(stack, make_trainer):
    config = SenderConfig(max_snapshots=2, read_timeout_s=0.5)
    trainer = make_trainer(SHAPES, config=config)
    sender = trainer.senders[0]
    sessions = []
    for version in (1, 2):
        trainer.publish(version)
        sessions.append(slow_reader(stack, sender.endpoint, version))
    began = time.monotonic()
    sender.publish(3)
    assert 0.3 < time.monotonic() - began < 20.0
    assert sender.newest_version == 3
    with pytest.raises(PeerLostError):
        sessions[0].pin(3, "newest", Deadline.after(10))


def test_a_time_to_read_that_is_none_is_refused():
    with pytest.raises(ConfigurationError, match=r"read_timeout_s is 0\.0; it must be above 0"):
        SenderConfig(read_timeout_s=0.0)
