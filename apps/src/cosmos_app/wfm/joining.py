"""The process group of a world model's process, which one by itself has where FSDP2 has to cast."""

from dataclasses import replace

import torch

from cosmos_app.roles.process import torchrun_place
from cosmos_app.roles.ranks import join_ranks
from cosmos_parallel import (
    ParallelConfig,
    TrainingMesh,
    build_mesh,
    init_distributed,
    open_store,
)
from cosmos_wfm import ComputeConfig


def join_mesh(parallel: ParallelConfig, compute: ComputeConfig) -> TrainingMesh:
    """Join torchrun's ranks, or be a rank by oneself; ``shutdown_distributed`` leaves them."""
    place = torchrun_place()
    if torch.cuda.is_available():  # replicas may be more than devices
        place = replace(place, local_rank=place.local_rank % torch.cuda.device_count())
    if place.world_size > 1 or compute.dtype == "float32":
        return build_mesh(parallel, join_ranks(place))
    device = f"cuda:{place.local_rank}" if torch.cuda.is_available() else "cpu"
    store = open_store("127.0.0.1", 0, hosting=True)
    return build_mesh(parallel, init_distributed(0, 1, store=store, device=device))
