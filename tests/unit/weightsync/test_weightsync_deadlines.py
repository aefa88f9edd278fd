"""Who wants to wait for ever may say so."""

import math

import pytest
import torch

from cosmos_weightsync import (
    ConfigurationError,
    ReceiverConfig,
    SenderConfig,
    WeightReceiver,
    WeightSender,
    shards_of,
)


@pytest.mark.parametrize("transport", ["shared_memory", "cross_memory", "tcp"])
@pytest.mark.parametrize("seconds", [math.inf, 1e12])
def test_a_wait_may_be_infinite(transport, seconds):
    patient = SenderConfig(publish_timeout_s=seconds, idle_s=seconds)
    config = ReceiverConfig(
        transport=transport, stall_s=seconds, linger_s=seconds, connect_timeout_s=seconds
    )
    with (
        WeightSender(shards_of({"weight": torch.ones(3)}), config=patient) as sender,
        WeightReceiver([sender.endpoint], config=config) as receiver,
    ):
        sender.publish(1)
        assert receiver.stage(1, timeout_s=seconds).version == 1
        receiver.verify(timeout_s=seconds)


def test_a_wait_that_is_no_number_is_refused():
    with (
        WeightSender(shards_of({"weight": torch.ones(3)})) as sender,
        WeightReceiver([sender.endpoint]) as receiver,
        pytest.raises(ConfigurationError, match="nan"),
    ):
        receiver.stage(1, timeout_s=math.nan)
