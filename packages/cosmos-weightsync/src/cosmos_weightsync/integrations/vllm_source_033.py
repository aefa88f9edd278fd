"""The trainer's weights as vLLM 0.33 declares them: owners, mesh and placements of every tensor.

``iter_local`` yields the parts that a rank holds, so nothing is gathered; a source without it is
iterated in full tensors.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor
from torch.distributed.tensor import Placement, Replicate
from torch.distributed.tensor import Shard as ShardPlacement

from cosmos_weightsync.layout import ShardSpec
from cosmos_weightsync.shards import Shard, dtype_name, held_boxes, shards_of

__all__ = ["applies", "shards_of_source"]


def applies(source: Any) -> bool:
    """Whether ``source`` is a ``WeightSource`` of vLLM 0.33."""
    return callable(getattr(source, "implements_iter_local", None))


def shards_of_source(source: Any, rank: int, num_ranks: int) -> tuple[Shard, ...]:
    """This rank's shards, by the placements that the source declares."""
    declared: Mapping[str, Any] = {meta.name: meta for meta in source.metadata}
    is_local = source.implements_iter_local()
    tensors = source.iter_local() if is_local else source.iter_full()
    found: list[Shard] = []
    for index, (name, tensor) in enumerate(tensors):
        meta = declared[name]
        if is_local and meta.placements is not None:
            found.extend(_placed(meta, tensor.detach(), rank))
        elif meta.owners is not None or index % num_ranks == rank:
            found.extend(shards_of([(name, tensor.detach())]))
    return tuple(found)


def _placed(meta: Any, local: Tensor, rank: int) -> Iterator[Shard]:
    """The boxes of one tensor on this rank, cut as `torch.chunk` does along each mesh axis."""
    coordinate = np.unravel_index(meta.owners.index(rank), meta.mesh_shape)
    boxes = held_boxes(
        meta.name,
        tuple(meta.shape),
        tuple(meta.mesh_shape),
        _placements(meta.placements),
        tuple(int(at) for at in coordinate),
    )
    for box, slices in boxes:
        spec = ShardSpec(meta.name, tuple(meta.shape), box, dtype_name(local.dtype))
        yield Shard(spec, local[slices])


def _placements(declared: Sequence[Any]) -> tuple[Placement, ...]:
    """The placements that vLLM declares, which only have a ``dim`` where they shard."""
    return tuple(
        ShardPlacement(one.dim) if hasattr(one, "dim") else Replicate() for one in declared
    )
