"""Meshes: how the ranks of one policy replica are arranged, with torchtitan's axes.

``ParallelConfig`` says how many ranks each axis has; ``build_mesh`` turns it into a
``TrainingMesh``, which is all that loading, learning and checkpoints ask of the arrangement.
"""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from cosmos_parallel.errors import MeshError
from cosmos_parallel.process import ProcessContext
from cosmos_parallel.titan import parallel_dims

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torchtitan.distributed import ParallelDims

FILL = -1
_LATER_AXES = ("tp", "cp", "pp", "ep")


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelConfig:
    """Degree of each parallel axis inside one policy replica.

    Attributes:
        dp_replicate: copies of the sharded model (HSDP); gradients are summed over them.
        dp_shard: ranks that share one copy of the parameters (FSDP2); -1 takes the ranks that the
            other axes leave.
        tp: tensor parallel ranks; only 1 is supported.
        cp: context parallel ranks; only 1 is supported.
        pp: pipeline stages; only 1 is supported.
        ep: expert parallel ranks; only 1 is supported.
    """

    dp_replicate: int = 1
    dp_shard: int = FILL
    tp: int = 1
    cp: int = 1
    pp: int = 1
    ep: int = 1

    def __post_init__(self) -> None:
        """Refuse degrees that no number of ranks can have.

        Raises:
            MeshError: if a degree is below 1 (``dp_shard`` may be -1) or not supported.
        """
        for axis in ("dp_replicate", "dp_shard", *_LATER_AXES):
            degree = getattr(self, axis)
            if degree < 1 and not (axis == "dp_shard" and degree == FILL):
                allowed = "1 or more, or -1 for the rest" if axis == "dp_shard" else "1 or more"
                raise MeshError(f"{axis} is {degree}; it must be {allowed}")
        for axis in _LATER_AXES:
            if getattr(self, axis) != 1:
                raise MeshError(
                    f"{axis} is {getattr(self, axis)}; this version trains with data parallelism "
                    f"only (dp_replicate x dp_shard), so {axis} must be 1"
                )

    def resolve(self, world_size: int) -> "ParallelConfig":
        """Return the same config with ``dp_shard`` filled in for ``world_size`` ranks.

        Raises:
            MeshError: if the degrees do not multiply to ``world_size``.
        """
        others = self.dp_replicate * self.tp * self.cp * self.pp
        if self.dp_shard == FILL:
            if world_size % others:
                raise MeshError(
                    f"{world_size} ranks cannot be divided by dp_replicate {self.dp_replicate}; "
                    f"dp_replicate must be one of {_divisors(world_size)}"
                )
            shard = world_size // others
        else:
            shard = self.dp_shard
        if shard * others != world_size:
            raise MeshError(
                f"dp_replicate {self.dp_replicate} x dp_shard {shard} makes {shard * others} "
                f"ranks, but the replica has {world_size}; their product must be {world_size}: "
                f"dp_shard = -1 takes what dp_replicate (one of {_divisors(world_size)}) leaves"
            )
        return ParallelConfig(dp_replicate=self.dp_replicate, dp_shard=shard)


class TrainingMesh:
    """The ranks of one policy replica, arranged.

    A mesh without a process group is one rank by itself, and every reduction is the identity.

    Attributes:
        config: the resolved degrees.
        process: this rank.
        dims: torchtitan's own object, for what needs more than the methods here; ``None`` without
            a process group.
    """

    def __init__(
        self, config: ParallelConfig, process: ProcessContext, dims: "ParallelDims | None"
    ) -> None:
        self.config = config
        self.process = process
        self.dims = dims
        self._data_mesh: DeviceMesh | None = None
        if dims is not None:
            axes = ["dp_replicate", "fsdp"] if config.dp_replicate > 1 else ["fsdp"]
            self._data_mesh = dims.get_mesh(axes)

    @property
    def is_distributed(self) -> bool:
        """Whether there is a process group, possibly of one rank."""
        return self.dims is not None

    @property
    def data_rank(self) -> int:
        """This rank's position along the data: which share of the samples is its own."""
        return self.process.rank

    @property
    def data_size(self) -> int:
        """Among how many ranks the samples are divided."""
        return self.process.world_size

    @property
    def fsdp_mesh(self) -> "DeviceMesh":
        """The mesh ``fully_shard`` takes: 1-D (shard) or 2-D (replicate, shard).

        Raises:
            MeshError: if there is no process group.
        """
        if self._data_mesh is None:
            raise MeshError("this rank is by itself: there is no mesh to shard over")
        return self._data_mesh

    def sum_(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum a tensor over all ranks of the replica, in place; every rank calls."""
        if self.is_distributed:
            dist.all_reduce(tensor, op=dist.ReduceOp.SUM)
        return tensor

    def max_(self, tensor: torch.Tensor) -> torch.Tensor:
        """Take the maximum over all ranks of the replica, in place; every rank calls."""
        if self.is_distributed:
            dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        return tensor

    def barrier(self) -> None:
        """Wait until every rank of the replica is here."""
        if self.is_distributed:
            self.sum_(torch.zeros(1, device=self.process.device))


def build_mesh(config: ParallelConfig, process: ProcessContext | None = None) -> TrainingMesh:
    """Arrange the ranks of this replica; every rank calls.

    Without a default process group (see ``init_distributed``) the mesh is this process alone, and
    models stay plain modules.

    Raises:
        MeshError: if the degrees do not fit the number of ranks.
    """
    process = process or ProcessContext()
    resolved = config.resolve(process.world_size)
    if not dist.is_initialized():
        if process.world_size > 1:
            raise MeshError(
                f"{process.world_size} ranks but no process group; call init_distributed first"
            )
        return TrainingMesh(resolved, process, None)
    dims = parallel_dims(
        process.device_type,
        world_size=process.world_size,
        dp_replicate=resolved.dp_replicate,
        dp_shard=resolved.dp_shard,
        tp=resolved.tp,
        cp=resolved.cp,
        pp=resolved.pp,
        ep=resolved.ep,
    )
    dims.build_mesh()
    return TrainingMesh(resolved, process, dims)


def _divisors(number: int) -> list[int]:
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})
