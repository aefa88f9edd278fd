"""FSDP2 over any module, with gradients that are sums and names that do not change."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from cosmos_parallel.errors import MeshError, ParallelError
from cosmos_parallel.gradients import local_part
from cosmos_parallel.mesh import TrainingMesh


def model_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return parameters and persistent buffers by name; tied ones once, by their first name."""
    tensors: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, value in module.state_dict(keep_vars=True).items():
        if id(value) not in seen:
            seen.add(id(value))
            tensors[name] = value.detach()
    return tensors


def copy_weights(source: nn.Module, target: nn.Module) -> None:
    """Give a model the weights of another of the same layout; each rank copies what it holds.

    Args:
        source: may have more tensors, such as a value head.
        target: written in place.

    Raises:
        ParallelError: if ``source`` lacks a tensor, or has it in another shape.
    """
    given = model_tensors(source)
    for name, mine in model_tensors(target).items():
        found = local_part(given[name]) if name in given else None
        part = local_part(mine)
        if found is None or found.shape != part.shape:
            offer = "there is none" if found is None else f"it is {tuple(found.shape)}"
            raise ParallelError(f"{name} needs {tuple(part.shape)} on this rank; {offer}")
        part.copy_(found)


def shard_module(
    module: nn.Module,
    mesh: TrainingMesh,
    *,
    blocks: Sequence[nn.Module],
    compute_dtype: torch.dtype | None = None,
) -> nn.Module:
    """Shard the parameters of ``module`` over the mesh, in place; every rank calls.

    Each block is gathered by itself while it computes; what is in no block is gathered with the
    root. Gradients come out as the *sum* over all ranks of the replica: nothing is averaged, the
    learner divides once. Parameter names stay as they were.

    Args:
        module: the whole model, the same on every rank.
        mesh: where to shard; on a mesh without a process group only the device changes.
        blocks: submodules of about equal size, in the order of the forward pass.
        compute_dtype: parameters are cast to this for forward and backward; gradients are reduced
            in float32. ``None`` computes in the parameters' own type.

    Raises:
        MeshError: if mixed precision is asked for without a process group.
    """
    if not mesh.is_distributed:
        own = next(module.parameters()).dtype
        if compute_dtype not in (None, own):
            raise mixed_precision_error(compute_dtype, own)
        return module.to(mesh.process.device)
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy()
    if compute_dtype is not None:
        policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
    for block in blocks:
        fully_shard(block, mesh=mesh.fsdp_mesh, mp_policy=policy)
    fully_shard(module, mesh=mesh.fsdp_mesh, mp_policy=policy)
    sum_gradients(module)
    return module


def reshard(module: nn.Module) -> None:
    """Give up what FSDP2 has gathered of a model, so that it is gathered anew when it is needed.

    A root and the stages of a pipeline stay gathered after a forward pass without a backward one,
    and do not see that their parameters are written to afterwards.
    """
    # asked for its state, FSDP2 gives up what each module of the model has, whichever it gathers
    # that module with; the root of torchtitan's models is no part of ours
    module.state_dict(keep_vars=True)


def sum_gradients(module: nn.Module) -> None:
    """Have every part that FSDP2 shards add gradients up over ranks, and not average them."""
    from torch.distributed.fsdp import FSDPModule

    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.set_gradient_divide_factor(1.0)
            # gloo cannot scale while it reduces, and with a factor of 1 nothing is lost
            part.set_force_sum_reduction_for_comms(True)


def keep_gathered(module: nn.Module) -> None:
    """Have a pipeline stage be gathered once for all micro-batches; weight gradients come late."""
    from torch.distributed.fsdp import FSDPModule

    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.set_reshard_after_forward(False)


def mixed_precision_error(compute_dtype: object, own: object) -> MeshError:
    """Say that computing in another type than the parameters' takes a process group."""
    return MeshError(
        f"computing in {compute_dtype} over {own} parameters needs FSDP2, hence a process "
        "group: call init_distributed(0, 1, ...) also for a single rank"
    )
