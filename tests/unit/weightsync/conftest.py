"""A trainer whose ranks share one process."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from typing import Any

import pytest
import torch

from cosmos_weightsync import Box, Shard, ShardSpec, WeightDirectory, WeightSender


def part(name: str, tensor: torch.Tensor, index: int, count: int) -> Shard:
    """Part ``index`` of ``count`` along dim 0, as torch.chunk cuts; the whole of a scalar."""
    box = Box.full(tensor.shape)
    if tensor.ndim:
        step = -(-tensor.shape[0] // count)
        edges = [min(step * i, tensor.shape[0]) for i in (index, index + 1)]
        box = Box((edges[0], *box.start[1:]), (edges[1], *box.stop[1:]))
    spec = ShardSpec(name, tuple(tensor.shape), box, "float32")
    return Shard(spec, tensor[box.relative_to(Box.full(tensor.shape))])


class Trainer:
    """HSDP: ``replicas`` copies of the model, each cut in two; rank = 2 * replica + shard.

    Args:
        stack: Closes the senders.
        shapes: Of the model.
        replicas: How many copies.
        hooks: Rank r may also send by ``hooks[r]``.
        more: For every sender.
    """

    def __init__(
        self,
        stack: ExitStack,
        shapes: Mapping[str, tuple[int, ...]],
        *,
        replicas: int = 1,
        hooks: Mapping[int, Any] | None = None,
        **more: Any,
    ) -> None:
        self.full = {name: torch.zeros(shape) for name, shape in shapes.items()}
        transports = [*more.pop("transports", ())]
        hooks = hooks or {}
        self.senders = [
            stack.enter_context(
                WeightSender(
                    [part(name, tensor, rank % 2, 2) for name, tensor in self.full.items()],
                    rank=rank,
                    num_ranks=2 * replicas,
                    transports=[*transports, *([hooks[rank]] if rank in hooks else [])],
                    **more,
                )
            )
            for rank in range(2 * replicas)
        ]

    def step(self, seed: int) -> dict[str, torch.Tensor]:
        """Change every element; what it is then."""
        generator = torch.Generator().manual_seed(seed)
        for tensor in self.full.values():
            tensor.copy_(torch.randn(tensor.shape, generator=generator))
        return {name: tensor.clone() for name, tensor in self.full.items()}

    def publish(self, version: int) -> dict[str, torch.Tensor]:
        """Step and publish."""
        copy = self.step(version)
        for sender in self.senders:
            sender.publish(version)
        return copy

    @property
    def endpoints(self) -> list[str]:
        return [sender.endpoint for sender in self.senders]


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as found:
        yield found


@pytest.fixture
def directory(stack: ExitStack) -> WeightDirectory:
    """One whose members are forgotten within seconds."""
    return stack.enter_context(WeightDirectory(lease_s=1.0))


@pytest.fixture
def make_part() -> Callable[..., Shard]:
    """Cuts a tensor as a `make_trainer` trainer does."""
    return part


@pytest.fixture
def make_trainer(stack: ExitStack) -> Callable[..., Trainer]:
    """Makes a trainer of a model's shapes."""

    def trainer(shapes: Mapping[str, tuple[int, ...]], **more: Any) -> Trainer:
        return Trainer(stack, shapes, **more)

    return trainer
