"""A transport that both ends have and cannot be used between them: the system may say so."""

import sys

import pytest
import torch
from capabilities import needs

from cosmos_weightsync import (
    ReceiverConfig,
    TransportUnavailableError,
    WeightReceiver,
    WeightSender,
    shards_of,
)
from cosmos_weightsync.transports import Capabilities
from cosmos_weightsync.transports.host_sockets import prepare_on_host

pytestmark = needs("linux", sys.platform == "linux")


class Forbidden:
    """The best of all, and no receiver may open what its sender tells."""

    name = "forbidden"
    capabilities = Capabilities(same_host=True, copies=0, direct_bytes=1, message_bytes=1 << 20)

    def prepare(self, side, host):
        return prepare_on_host(self.name, side, sending=self._sending, receiving=self._receiving)

    def _sending(self, connection, deadline):
        connection.receive(1, deadline)
        raise AssertionError("nobody says yes")

    def _receiving(self, connection, deadline):
        raise TransportUnavailableError("pidfd_getfd: Operation not permitted")


def pulled(transport):
    sent, served = torch.nn.Linear(30, 20), torch.nn.Linear(30, 20)
    config = ReceiverConfig(transport=transport, connect_timeout_s=20.0)
    with WeightSender(shards_of(sent), transports=[Forbidden()]) as sender:
        sender.publish(1)
        with WeightReceiver(
            [sender.endpoint], wanted=shards_of(served), config=config, transports=[Forbidden()]
        ) as receiver:
            receiver.stage(1)
            receiver.commit()
            return torch.equal(sent.weight, served.weight)


def test_the_next_best_is_taken_where_the_choice_is_free():
    assert pulled("auto")


def test_one_that_was_asked_for_is_an_error():
    with pytest.raises(TransportUnavailableError, match="pidfd_getfd"):
        pulled("forbidden")
