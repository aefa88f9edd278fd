"""What torchtitan needs to be told before it works without a GPU; nothing else adapts it.

torchtitan takes the device type from the machine at import and keeps it in module variables. The
process knows better (a CPU run on a GPU machine, or no GPU at all), so the variables are set here.
"""

import importlib
from typing import TYPE_CHECKING, Literal

import torch

if TYPE_CHECKING:
    from torchtitan.distributed import ParallelDims

DeviceType = Literal["cpu", "cuda"]
# The backend seen working on CPU and gloo; parameters are DTensors on the sharded axes only.
_BACKEND = "partial_dtensor"


def prepare(device_type: DeviceType) -> None:
    """Tell torchtitan where this process computes; called before anything of it is used."""
    # registers the backend that torchtitan gives to axes of one rank
    importlib.import_module("torch.testing._internal.distributed.fake_pg")
    tools = importlib.import_module("torchtitan.tools.utils")
    device_module = torch.cpu if device_type == "cpu" else torch.cuda
    vars(tools).update(device_type=device_type, device_module=device_module)
    dims = importlib.import_module("torchtitan.distributed.parallel_dims")
    vars(dims).update(device_type=device_type)
    importlib.import_module("torchtitan.distributed.utils").set_spmd_backend(_BACKEND)


def parallel_dims(device_type: DeviceType, *, world_size: int, **degrees: int) -> "ParallelDims":
    """Return torchtitan's description of the mesh, set up for ``device_type``.

    Args:
        device_type: where this process computes.
        world_size: number of ranks in the replica.
        **degrees: ``dp_replicate``, ``dp_shard``, ``cp``, ``tp``, ``pp`` and ``ep``.
    """
    prepare(device_type)
    dims = importlib.import_module("torchtitan.distributed.parallel_dims")
    return dims.ParallelDims(world_size=world_size, spmd_backend=_BACKEND, **degrees)
