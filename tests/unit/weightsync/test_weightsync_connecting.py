"""A receiver that is told of others to fetch from goes on serving what it has."""

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest
import torch

from cosmos_weightsync import (
    Box,
    ConfigurationError,
    LayoutError,
    PeerLostError,
    ReceiverConfig,
    ShardSpec,
    VersionError,
    WeightDirectory,
    WeightReceiver,
    WeightSender,
    shards_of,
)

SERVING = ReceiverConfig(transport="tcp", serve_host="127.0.0.1")


def sender_of(value: float, version: int) -> WeightSender:
    sender = WeightSender(shards_of([("w", torch.full((6, 4), value))]))
    sender.publish(version)
    return sender


def value_of(receiver: WeightReceiver) -> float:
    (shard,) = receiver.staged_shards()
    (value,) = shard.tensor.unique().tolist()
    return value


def test_what_it_has_is_served_before_and_after():
    with sender_of(1.0, 1) as first, WeightReceiver([first.endpoint], config=SERVING) as holder:
        holder.stage(1)
        served_at = holder.endpoint
        with sender_of(2.0, 2) as second:
            holder.connect([second.endpoint])
            first.close()
            with WeightReceiver([served_at]) as newcomer:
                assert newcomer.stage(1).version == 1
                assert value_of(newcomer) == 1.0
                with pytest.raises(VersionError, match="nothing is staged"):
                    holder.commit()
                assert holder.stage(2).version == 2
                assert holder.endpoint == served_at
                assert newcomer.stage(2).version == 2
                assert value_of(newcomer) == value_of(holder) == 2.0


def test_a_newcomer_fetches_from_a_receiver_first_and_from_the_sender_then():
    with (
        sender_of(1.0, 1) as sender,
        WeightReceiver([sender.endpoint], config=SERVING) as holder,
    ):
        holder.stage(1)
        with WeightReceiver([holder.endpoint], config=SERVING) as newcomer:
            newcomer.stage(1)
            newcomer.commit()
            newcomer.connect([sender.endpoint])
            assert newcomer.version == 1
            sender.publish(3)
            assert newcomer.stage(3).version == 3
            assert holder.staged is not None
            assert holder.staged.version == 1


@pytest.mark.parametrize("endpoints", [[], ["nowhere"], "127.0.0.1:1"])
def test_endpoints_that_make_no_sense_change_nothing(endpoints):
    with sender_of(1.0, 1) as sender, WeightReceiver([sender.endpoint]) as receiver:
        with pytest.raises(ConfigurationError):
            receiver.connect(endpoints)
        assert receiver.stage(1).version == 1


def test_where_there_is_a_directory_it_tells():
    with WeightDirectory() as directory:
        config = ReceiverConfig(directory=directory.endpoint)
        with (
            WeightReceiver(config=config) as receiver,
            pytest.raises(ConfigurationError, match="directory"),
        ):
            receiver.connect([])


def test_receivers_without_a_version_pass_their_first_one_on_along_a_chain():
    """Each is told of the one before it, the last first; nobody has anything when it is told."""
    with ExitStack() as stack:
        chain = [stack.enter_context(WeightReceiver(config=SERVING)) for _ in range(5)]
        threads = stack.enter_context(ThreadPoolExecutor(len(chain)))
        staged = []
        for receiver, source in reversed(list(zip(chain[1:], chain, strict=False))):
            receiver.connect([source.endpoint])
            staged.append(threads.submit(receiver.stage, 1, timeout_s=60))
        sender = stack.enter_context(sender_of(1.0, 1))
        chain[0].connect([sender.endpoint])
        assert chain[0].stage(1).version == 1
        digests = {future.result(60).digest for future in staged}
        assert len(digests) == 1
        assert [value_of(receiver) for receiver in chain] == [1.0] * 5
        sender.publish(2)
        staged = [threads.submit(receiver.stage, 2, timeout_s=60) for receiver in chain]
        assert [future.result(60).version for future in staged] == [2] * 5


def test_who_waits_for_a_first_version_learns_that_it_will_not_come():
    with (
        ThreadPoolExecutor(1) as threads,
        WeightReceiver(config=SERVING) as holder,
        WeightReceiver([holder.endpoint]) as newcomer,
    ):
        staged = threads.submit(newcomer.stage, 1, timeout_s=60)
        time.sleep(0.3)  # it is connected, and greeted once the holder knows what it will have
        holder.close()
        with pytest.raises(PeerLostError):
            staged.result(20)


def test_what_is_wanted_is_told_later_than_where_it_is_served():
    spec = ShardSpec("w", (6, 4), Box((2, 0), (4, 4)), "float32")
    with sender_of(1.0, 1) as sender, WeightReceiver(wanted=(), config=SERVING) as receiver:
        served_at = receiver.endpoint
        receiver.connect([sender.endpoint])
        receiver.want([spec])
        receiver.stage(1)
        (shard,) = receiver.staged_shards()
        assert shard.tensor.shape == (2, 4)
        with WeightReceiver([served_at], wanted=[spec]) as reader:
            reader.stage(1)
            assert value_of(reader) == 1.0
        receiver.want([ShardSpec("w", (6, 4), Box((0, 0), (6, 4)), "float32")])
        with pytest.raises(VersionError, match="nothing is staged"):
            receiver.staged_shards()
        receiver.stage(1)
        assert receiver.endpoint == served_at
        assert [tuple(s.tensor.shape) for s in receiver.staged_shards()] == [(6, 4)]
        with pytest.raises(LayoutError, match="w"):
            receiver.want([spec, spec])


def test_a_receiver_that_is_told_of_nobody_says_so():
    with (
        WeightReceiver(config=SERVING) as receiver,
        pytest.raises(ConfigurationError, match="'connect' this receiver"),
    ):
        receiver.stage(1)
    with pytest.raises(ConfigurationError, match="the endpoint of every sender rank"):
        WeightReceiver()


def test_a_receiver_in_place_fetches_what_it_was_made_for():
    given = shards_of([("w", torch.zeros(6, 4))])
    config = ReceiverConfig(mode="in_place")
    with (
        sender_of(1.0, 1) as sender,
        WeightReceiver([sender.endpoint], wanted=given, config=config) as receiver,
        pytest.raises(ConfigurationError, match="in-place"),
    ):
        receiver.want([shard.spec for shard in given])
