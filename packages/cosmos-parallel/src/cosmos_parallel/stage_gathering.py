"""Tensors that ranks and stages have parts of, whole on one rank."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from cosmos_parallel.export_files import TensorPlace
from cosmos_parallel.mesh import TrainingMesh


def everyone(mesh: TrainingMesh, mine: Any) -> list[Any]:
    """Return what every rank has; every rank calls."""
    if not mesh.is_distributed:
        return [mine]
    found: list[Any] = [None] * mesh.process.world_size
    dist.all_gather_object(found, mine)
    return found


def places_of_all(
    own: Mapping[str, Tensor], mesh: TrainingMesh, dtype: torch.dtype | None = None
) -> list[TensorPlace]:
    """Return where the tensors of all stages are, stage after stage; every rank calls.

    Args:
        own: of this rank's stages, by name; whole or DTensors.
        mesh: the ranks that hold the model.
        dtype: what floating-point tensors are wanted in; ``None`` for their own.
    """
    stage = mesh.process.rank // mesh.ranks_per_stage
    places = [
        TensorPlace(
            name,
            tuple(value.shape),
            dtype if dtype is not None and value.is_floating_point() else value.dtype,
            stage,
        )
        for name, value in own.items()
    ]
    if mesh.config.pp == 1:
        return places
    of_stages = everyone(mesh, places)[:: mesh.ranks_per_stage]
    return [place for places in of_stages for place in places]


def gather_to(
    target: int, place: TensorPlace, own: Mapping[str, Tensor], mesh: TrainingMesh
) -> Tensor | None:
    """Return a whole tensor on one rank, in host memory, and nothing elsewhere; every rank calls.

    Args:
        target: the rank.
        place: of the tensor.
        own: as of `places_of_all`.
        mesh: the ranks that hold the model.
    """
    rank, per_stage = mesh.process.rank, mesh.ranks_per_stage
    first = place.stage * per_stage
    is_elsewhere = target // per_stage != place.stage
    if rank // per_stage == place.stage:
        value = own[place.name]
        gathered = value.full_tensor() if isinstance(value, DTensor) else value
        if rank != (first if is_elsewhere else target):
            return None
        whole = gathered.to("cpu", place.dtype).contiguous()
        if not is_elsewhere:
            return whole
        dist.send(whole, target)
    elif rank == target:
        whole = torch.empty(place.shape, dtype=place.dtype)
        dist.recv(whole, first)
        return whole
    return None
