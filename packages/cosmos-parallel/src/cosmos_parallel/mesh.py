"""Meshes: how the ranks of one policy replica are arranged, with torchtitan's axes.

``ParallelConfig`` says how many ranks each axis has; ``build_mesh`` turns it into a
``TrainingMesh``, which is all that loading, learning and checkpoints ask of the arrangement.
"""

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import torch
import torch.distributed as dist

from cosmos_core.choices import check_choice
from cosmos_parallel.errors import MeshError
from cosmos_parallel.process import ProcessContext
from cosmos_parallel.titan import parallel_dims

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torchtitan.distributed import ParallelDims

FILL = -1
PipelineSchedule = Literal["1F1B", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble"]
_AXES = ("dp_replicate", "dp_shard", "cp", "tp", "pp", "ep")


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelConfig:
    """Degree of each parallel axis inside one policy replica.

    The product ``dp_replicate x dp_shard x cp x tp x pp`` is the number of ranks; ``ep`` takes its
    ranks from ``dp_shard x cp x tp``.

    Attributes:
        dp_replicate: copies of the sharded model (DDP, HSDP); gradients are summed over them.
        dp_shard: ranks that share one copy of the parameters (FSDP2); -1 takes the ranks that the
            other axes leave.
        cp: ranks that share every sequence; parameters are sharded over them as well.
        tp: ranks that share every matrix; between matrices they share the sequence.
        pp: ranks that have consecutive layers each.
        ep: ranks among which the experts of a mixture are divided.
        pp_schedule: in which order stages work on micro-batches. ``1F1B`` gives each rank one
            stage, the others two.
    """

    dp_replicate: int = 1
    dp_shard: int = FILL
    cp: int = 1
    tp: int = 1
    pp: int = 1
    ep: int = 1
    pp_schedule: PipelineSchedule = "1F1B"

    def __post_init__(self) -> None:
        """Refuse degrees that no number of ranks can have.

        Raises:
            MeshError: if a degree is below 1 (``dp_shard`` may be -1), or the schedule is unknown.
        """
        check_choice("pp_schedule", self.pp_schedule, PipelineSchedule, error=MeshError)
        for axis in _AXES:
            degree = getattr(self, axis)
            if degree < 1 and not (axis == "dp_shard" and degree == FILL):
                allowed = "1 or more, or -1 for the rest" if axis == "dp_shard" else "1 or more"
                raise MeshError(f"{axis} is {degree}; it must be {allowed}")

    @property
    def num_stages(self) -> int:
        """Pipeline stages over all ranks."""
        return self.pp * (1 if self.pp_schedule == "1F1B" or self.pp == 1 else 2)

    def resolve(self, world_size: int) -> "ParallelConfig":
        """Return the same config with ``dp_shard`` filled in for ``world_size`` ranks.

        Raises:
            MeshError: if the degrees do not multiply to ``world_size``, or ``ep`` does not divide
                the ranks that it is taken from.
        """
        others = {axis: getattr(self, axis) for axis in ("dp_replicate", "cp", "tp", "pp")}
        product = math.prod(others.values())
        named = " x ".join(f"{axis} {n}" for axis, n in others.items() if n > 1) or "dp_replicate 1"
        if self.dp_shard == FILL and world_size % product:
            raise MeshError(
                f"{world_size} ranks cannot be divided by {named}; "
                f"each of these must be one of {_divisors(world_size)}, and so must their product"
            )
        shard = world_size // product if self.dp_shard == FILL else self.dp_shard
        if shard * product != world_size:
            raise MeshError(
                f"{named} x dp_shard {shard} makes {shard * product} "
                f"ranks, but the replica has {world_size}; their product must be {world_size}: "
                f"dp_shard = -1 takes what the others (each one of {_divisors(world_size)}) leave"
            )
        lending = shard * self.cp * self.tp
        if lending % self.ep:
            raise MeshError(
                f"ep {self.ep} does not divide dp_shard {shard} x cp {self.cp} x tp {self.tp} = "
                f"{lending}, the ranks it is taken from; it must be one of {_divisors(lending)}"
            )
        return replace(self, dp_shard=shard)


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
        """This rank's position along the data: which share of the samples is its own.

        Ranks that hold parts of one copy of the model (tp, cp, pp) have the same.
        """
        return self.data_ranks[self.process.rank]

    @property
    def data_ranks(self) -> list[int]:
        """The ``data_rank`` of every rank of the replica, in their order."""
        ranks_of_sample = self.config.tp * self.config.cp
        return [rank // ranks_of_sample % self.data_size for rank in range(self.process.world_size)]

    @property
    def data_size(self) -> int:
        """Among how many ranks the samples are divided."""
        return self.config.dp_replicate * self.config.dp_shard

    @property
    def ranks_per_stage(self) -> int:
        """Ranks that hold a part or a copy of the same layers."""
        return self.process.world_size // self.config.pp

    @property
    def context_group(self) -> dist.ProcessGroup | None:
        """The ranks that have a stretch of the same sequences each; ``None`` where none do."""
        if self.dims is None or self.config.cp == 1:
            return None
        return self.dims.get_mesh("cp").get_group()

    @property
    def gradient_scale(self) -> float:
        """Factor on a total before its backward pass.

        Ranks that share a sequence (cp) compute the same total, and the gradients that reach
        parameters on each are added up.
        """
        return 1.0 / self.config.cp

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

    def sum_over_data(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum over the data what ranks of one copy of the model (tp, cp, pp) have alike, in place.

        Every rank calls.
        """
        return self.sum_(tensor).div_(self.process.world_size // self.data_size)

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
