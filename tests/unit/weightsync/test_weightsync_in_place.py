"""Receiving into the weights themselves: a fence from the first byte until the commit."""

from contextlib import ExitStack

import pytest
import torch

from cosmos_weightsync import (
    FencedError,
    LayoutError,
    PeerLostError,
    ReceiverConfig,
    ShardSpec,
    WeightReceiver,
    WeightSender,
    shards_of,
)
from cosmos_weightsync.boxes import Box
from cosmos_weightsync.transports import TcpTransport

SHAPES = {"embed": (64, 48), "norm": (16,)}
IN_PLACE = ReceiverConfig(mode="in_place", transport="tcp", bucket_bytes=2048)


def model(value: float) -> dict[str, torch.Tensor]:
    return {name: torch.full(shape, value) for name, shape in SHAPES.items()}


class Dying(TcpTransport):
    """Breaks every connection once ``left`` messages have gone; -1 is never."""

    left = -1

    def prepare(self, side, host):
        return _Pending(self, super().prepare(side, host))


class _Pending:
    def __init__(self, dying, pending) -> None:
        self._dying, self._pending = dying, pending
        self.description, self.close = pending.description, pending.close

    def connect(self, peer, deadline):
        return _Channel(self._dying, self._pending.connect(peer, deadline))


class _Channel:
    def __init__(self, dying, channel) -> None:
        self._dying, self._channel = dying, channel
        self.device, self.capabilities = channel.device, channel.capabilities
        self.close = channel.close

    def send(self, view, deadline) -> None:
        if self._dying.left == 0:
            raise PeerLostError("killed by the test")
        self._dying.left -= 1
        self._channel.send(view, deadline)


class Trainer:
    def __init__(self, stack: ExitStack) -> None:
        self.model, self.dying = model(0.0), Dying()
        shards = shards_of(self.model.items())
        self.sender = stack.enter_context(WeightSender(shards, transports=[self.dying]))

    def publish(self, version: int) -> None:
        for tensor in self.model.values():
            tensor.fill_(version)
        self.sender.publish(version)


@pytest.fixture
def trainer(stack: ExitStack) -> Trainer:
    return Trainer(stack)


def test_the_weights_are_received_where_they_are_used(trainer, stack):
    served = model(-1.0)
    receiver = WeightReceiver(
        [trainer.sender.endpoint], wanted=shards_of(served.items()), config=IN_PLACE
    )
    stack.enter_context(receiver)
    trainer.publish(1)
    receiver.stage(1)
    assert receiver.version is None  # The fence is up until somebody commits.
    assert all(tensor.eq(1).all() for tensor in served.values())
    assert {s.tensor.data_ptr() for s in receiver.staged_shards()} == {
        tensor.data_ptr() for tensor in served.values()
    }
    assert (receiver.commit(), receiver.version) == (1, 1)
    assert receiver.verify() == receiver.staged.digest


def test_a_failure_half_way_leaves_a_fence_and_the_next_version_lifts_it(trainer, stack):
    served = model(-1.0)
    receiver = WeightReceiver(
        [trainer.sender.endpoint], wanted=shards_of(served.items()), config=IN_PLACE
    )
    stack.enter_context(receiver)
    trainer.publish(1)
    receiver.stage(1)
    receiver.commit()
    trainer.publish(2)
    trainer.dying.left = 4
    with pytest.raises(PeerLostError, match=r"sender rank 0 .* nobody else .* version 2"):
        receiver.stage(2, timeout_s=30)
    mixed = {value for tensor in served.values() for value in tensor.unique().tolist()}
    assert mixed == {1.0, 2.0}
    assert receiver.version is None
    with pytest.raises(FencedError, match="of no version"):
        receiver.commit()
    trainer.dying.left = -1
    receiver.stage(2)
    receiver.commit()
    assert receiver.version == 2
    assert all(tensor.eq(2).all() for tensor in served.values())


def test_a_failure_before_the_first_byte_leaves_the_version_in_use(trainer, stack):
    served = model(-1.0)
    receiver = WeightReceiver(
        [trainer.sender.endpoint], wanted=shards_of(served.items()), config=IN_PLACE
    )
    stack.enter_context(receiver)
    trainer.publish(1)
    receiver.stage(1)
    receiver.commit()
    trainer.sender.close()
    with pytest.raises(PeerLostError):
        receiver.stage(2, timeout_s=5)
    assert receiver.version == 1
    assert all(tensor.eq(1).all() for tensor in served.values())


def test_a_cast_has_no_place_in_place(trainer, stack):
    served = {name: tensor.bfloat16() for name, tensor in model(0.0).items()}
    receiver = WeightReceiver(
        [trainer.sender.endpoint], wanted=shards_of(served.items()), config=IN_PLACE
    )
    stack.enter_context(receiver)
    with pytest.raises(LayoutError, match=r"embed .*: wanted here as bfloat16, .* sends float32"):
        receiver.stage(0)


def test_specs_have_no_place_to_receive_into(trainer):
    spec = ShardSpec("norm", (16,), Box.full((16,)), "float32")
    with pytest.raises(LayoutError, match="needs shards with tensors"):
        WeightReceiver([trainer.sender.endpoint], wanted=[spec], config=IN_PLACE)
