"""The trainer's weights as vLLM 0.32 declares them: ``metadata()`` and iteration over full tensors.

A ``ModuleSource`` says nothing about how its module is sharded, so its module is asked; any other
source can only be iterated, which gathers.
"""

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from cosmos_weightsync.shards import Shard, shards_of

__all__ = ["applies", "shards_of_source"]


def applies(source: Any) -> bool:
    """Whether ``source`` is a ``WeightSource`` of vLLM 0.32."""
    return callable(getattr(source, "metadata", None)) and hasattr(source, "__iter__")


def shards_of_source(source: Any, rank: int, num_ranks: int) -> tuple[Shard, ...]:
    """This rank's shards.

    A source that is not a module is iterated, in step with the other ranks; of every tensor that
    comes out whole, one rank in turn keeps it, so that together they send it once.
    """
    module = getattr(source, "_module", None)
    if isinstance(module, nn.Module):
        return shards_of(module)
    held = source.held_names()
    mine = None if held is None else frozenset(held)
    return shards_of(_in_turn(source, mine, rank, num_ranks))


def _in_turn(
    source: Any, mine: frozenset[str] | None, rank: int, num_ranks: int
) -> Iterator[tuple[str, Tensor]]:
    for index, (name, tensor) in enumerate(source):
        is_mine = index % num_ranks == rank if mine is None else name in mine
        if tensor is not None and is_mine:
            yield name, tensor.detach().clone()
