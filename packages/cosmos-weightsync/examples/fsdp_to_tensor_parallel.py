"""torchrun --nproc-per-node 4 fsdp_to_tensor_parallel.py: ranks 0, 1 train; ranks 2, 3 serve."""

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from cosmos_weightsync import WeightReceiver, WeightSender, shards_of

dist.init_process_group("gloo")
rank, model = dist.get_rank(), nn.Linear(64, 96)
endpoint, endpoints = "", [""] * 4
trainers, servers = DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [2, 3])
if rank < 2:
    fully_shard(model, mesh=trainers)
    sender = WeightSender(shards_of(model), rank=rank, num_ranks=2)
    sender.publish(1)
    endpoint = sender.endpoint
dist.all_gather_object(endpoints, endpoint)
if rank >= 2:
    parallelize_module(model, servers, ColwiseParallel())
    receiver = WeightReceiver(endpoints[:2], wanted=shards_of(model))
    receiver.stage(1)
    receiver.commit()
dist.barrier()
