"""The mesh of a world model's process, among torchrun's ranks or by itself."""

from dataclasses import replace

import torch

from cosmos_app.roles.process import stay_on_loopback, torchrun_place
from cosmos_app.roles.ranks import join_ranks
from cosmos_parallel import ParallelConfig, TrainingMesh, build_mesh
from cosmos_wfm import ComputeConfig


def join_mesh(parallel: ParallelConfig, compute: ComputeConfig) -> TrainingMesh:
    """Join torchrun's ranks, or be a rank by oneself; ``shutdown_distributed`` leaves them."""
    stay_on_loopback()
    place = torchrun_place()
    if torch.cuda.is_available():  # replicas may be more than devices
        place = replace(place, local_rank=place.local_rank % torch.cuda.device_count())
    return build_mesh(parallel, join_ranks(place, casts=compute.dtype != "float32"))
