"""Each edge of a receiver takes the transport that is best between its two ends."""

from dataclasses import dataclass, field, replace

import torch

from cosmos_weightsync import Box, Shard, ShardSpec, WeightReceiver, WeightSender
from cosmos_weightsync.transports import (
    Capabilities,
    PendingChannel,
    SharedMemoryTransport,
    Side,
    TcpTransport,
    Transport,
)


@dataclass
class Noted:
    """A transport, by a name and number of copies of its own, that notes when it is taken."""

    real: Transport
    name: str
    copies: int
    taken: list[Side] = field(default_factory=list)

    @property
    def capabilities(self) -> Capabilities:
        return replace(self.real.capabilities, copies=self.copies)

    def prepare(self, side: Side, host: str) -> PendingChannel:
        self.taken.append(side)
        return self.real.prepare(side, host)


def half(values: torch.Tensor, rank: int) -> Shard:
    spec = ShardSpec("weight", (6, 7), Box((3 * rank, 0), (3 * rank + 3, 7)), "float32")
    return Shard(spec, values[3 * rank : 3 * rank + 3])


def test_one_receiver_reads_two_senders_over_different_transports():
    values, arrived = torch.arange(42.0).reshape(6, 7), torch.zeros(6, 7)
    fast = Noted(TcpTransport(), "fast", copies=0)  # The first sender alone has it.
    usual = Noted(SharedMemoryTransport(), "shared_memory", copies=1)
    with (
        WeightSender([half(values, 0)], rank=0, num_ranks=2, transports=[fast, usual]) as first,
        WeightSender([half(values, 1)], rank=1, num_ranks=2, transports=[usual]) as second,
    ):
        first.publish(1)
        second.publish(1)
        wanted = [Shard(ShardSpec("weight", (6, 7), Box.full((6, 7)), "float32"), arrived)]
        endpoints = [first.endpoint, second.endpoint]
        with WeightReceiver(endpoints, wanted=wanted, transports=[fast, usual]) as receiver:
            assert receiver.stage(1).wire_bytes == 6 * 7 * 4
            receiver.commit()
    assert sorted(fast.taken) == sorted(usual.taken) == ["receiver", "sender"]
    assert torch.equal(arrived, values)
