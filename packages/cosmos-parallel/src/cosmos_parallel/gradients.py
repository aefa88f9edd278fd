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


def gradient_squares(parameters: Sequence[nn.Parameter], mesh: TrainingMesh) -> Tensor:
    """Return the square of the 2-norm of all gradients together, float64; all ranks call.

    Each rank adds up the squares of the parts it holds, divided by how many ranks hold the same
    part; one reduction over the replica gives the square of the norm, on whichever axes the
    parameters are sharded. The host waits for nothing where the mesh is one device.
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    copies = [num_copies(gradient, mesh.ranks_per_stage) for gradient in gradients]
    if not gradients:
        return mesh.sum_(torch.zeros((), dtype=torch.float64, device=mesh.process.device))
    norms = torch._foreach_norm([local_part(g) for g in gradients], 2, torch.float32)  # pyright: ignore
    squares = torch.stack(norms).double().square()
    if any(count > 1 for count in copies):
        squares /= torch.tensor(copies, dtype=torch.float64, device=squares.device)
    return mesh.sum_(squares.sum())


def finish_gradients(parameters: Sequence[nn.Parameter], *, factor: float) -> None:
    """Multiply every gradient by ``factor``, in place."""
    parts = [local_part(p.grad) for p in parameters if p.grad is not None]
    if parts:
        torch._foreach_mul_(parts, factor)  # pyright: ignore


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
