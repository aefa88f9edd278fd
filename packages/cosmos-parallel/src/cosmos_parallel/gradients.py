"""Arithmetic on the gradients of a sharded model: sum over replicas, global norm, scaling."""

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from cosmos_parallel.mesh import TrainingMesh
from cosmos_parallel.replicas import ReplicaGroup

BUCKET_BYTES = 64 << 20


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's part of a DTensor, as a view; a plain tensor is its own part."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def laid_out_like(tensor: Tensor, part: Tensor) -> Tensor:
    """Return a tensor of which this rank has ``part``, divided as another of the same shape is."""
    if not isinstance(tensor, DTensor):
        return part
    return DTensor.from_local(
        part,
        tensor.device_mesh,
        tensor.placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )


def num_copies(tensor: Tensor, num_ranks: int = 1) -> int:
    """Return how many of ``num_ranks`` ranks hold the same part of a tensor.

    Args:
        tensor: one of this rank's; its mesh is some of those ranks, and the others hold copies.
        num_ranks: the ranks that have this tensor at all; at least those of its mesh.
    """
    if not isinstance(tensor, DTensor):
        return num_ranks
    mesh = tensor.device_mesh
    inside = math.prod(
        mesh.size(axis)
        for axis, placement in enumerate(tensor.placements)
        if placement.is_replicate()
    )
    return inside * max(num_ranks // mesh.size(), 1)


def gradient_norm(parameters: Sequence[nn.Parameter], mesh: TrainingMesh) -> float:
    """Return the 2-norm of all gradients together; every rank of the replica calls.

    Each rank adds up the squares of the parts it holds, divided by how many ranks hold the same
    part; one reduction over the replica gives the square of the norm, on whichever axes the
    parameters are sharded.
    """
    squares = torch.zeros((), dtype=torch.float64, device=mesh.process.device)
    for parameter in parameters:
        if parameter.grad is not None:
            part = local_part(parameter.grad)
            norm = torch.linalg.vector_norm(part, dtype=torch.float32).double()
            squares += norm.square() / num_copies(parameter.grad, mesh.ranks_per_stage)
    return math.sqrt(mesh.sum_(squares).item())


def finish_gradients(parameters: Sequence[nn.Parameter], *, factor: float) -> None:
    """Multiply every gradient by ``factor``, in place."""
    for parameter in parameters:
        if parameter.grad is not None:
            local_part(parameter.grad).mul_(factor)


def sum_over_replicas(parameters: Sequence[nn.Parameter], group: ReplicaGroup) -> None:
    """Sum every gradient over the policy replicas, in place.

    All replicas have the same layout, so the parts this rank holds are summed with those of the
    same rank elsewhere, packed into buckets. A parameter without gradient counts as zero where
    another replica has one; without any it stays without, as the optimizer then leaves it alone.
    """
    if not parameters:
        return
    counts = torch.tensor([float(parameter.grad is not None) for parameter in parameters])
    counts = counts.to(local_part(parameters[0]).device)
    group.sum_([counts])
    trained = [p for p, count in zip(parameters, counts.tolist(), strict=True) if count]
    for bucket in _buckets([_gradient_part(parameter) for parameter in trained]):
        packed = torch.cat([part.reshape(-1) for part in bucket])
        group.sum_([packed])
        offset = 0
        for part in bucket:
            part.copy_(packed[offset : offset + part.numel()].view_as(part))
            offset += part.numel()


def _gradient_part(parameter: nn.Parameter) -> Tensor:
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return local_part(parameter.grad)


def _buckets(parts: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    bucket: list[Tensor] = []
    size = 0
    for part in parts:
        num_bytes = part.numel() * part.element_size()
        if bucket and (size + num_bytes > BUCKET_BYTES or part.dtype != bucket[0].dtype):
            yield bucket
            bucket, size = [], 0
        bucket.append(part)
        size += num_bytes
    if bucket:
        yield bucket
