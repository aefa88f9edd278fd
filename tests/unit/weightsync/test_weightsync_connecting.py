"""A receiver that is told of others to fetch from goes on serving what it has."""

import pytest
import torch

from cosmos_weightsync import (
    ConfigurationError,
    ReceiverConfig,
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
