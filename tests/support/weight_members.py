"""Senders and receivers of one small model that find one another through a directory."""

import time
from collections.abc import Callable
from contextlib import ExitStack

import torch

from cosmos_weightsync import ReceiverConfig, SenderConfig, WeightReceiver, WeightSender, shards_of

SHAPES = {"embed": (40, 16), "norm": (7,)}


def model(value: float) -> dict[str, torch.Tensor]:
    return {name: torch.full(shape, value) for name, shape in SHAPES.items()}


class Sender:
    def __init__(
        self, stack: ExitStack, directory: str, rank=0, num_ranks=1, run_id="run", **more
    ) -> None:
        self.model = model(0.0)
        self.sender = WeightSender(
            shards_of(self.model.items()),
            rank=rank,
            num_ranks=num_ranks,
            config=SenderConfig(directory=directory, run_id=run_id),
            **more,
        )
        stack.enter_context(self.sender)

    def publish(self, version: int) -> None:
        for tensor in self.model.values():
            tensor.fill_(version)
        self.sender.publish(version)


class Receiver:
    def __init__(self, stack: ExitStack, directory: str, **config) -> None:
        self.model = model(-1.0)
        config = {"transport": "tcp", "serve_host": "127.0.0.1", "linger_s": 0.2, **config}
        self.receiver = WeightReceiver(
            wanted=shards_of(self.model.items()),
            config=ReceiverConfig(directory=directory, **config),
        )
        stack.enter_context(self.receiver)

    def update(self, version: int) -> None:
        self.receiver.stage(version, timeout_s=30)
        self.receiver.commit()

    def assert_holds(self, version: int) -> None:
        assert self.receiver.version == version
        assert all(tensor.eq(version).all() for tensor in self.model.values())


def wait_until(is_true: Callable[[], bool]) -> None:
    give_up = time.monotonic() + 30
    while not is_true():
        assert time.monotonic() < give_up
        time.sleep(0.01)
