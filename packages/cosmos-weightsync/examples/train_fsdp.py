"""torchrun --nproc-per-node 2 train_fsdp.py MODEL | python serve_vllm.py MODEL: trained, served."""

import signal
import sys

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM

from cosmos_weightsync import WeightSender, shards_of

dist.init_process_group("gloo")
rank, endpoints = dist.get_rank(), [""] * dist.get_world_size()
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
fully_shard(model)
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
tokens = torch.arange(32).reshape(2, 16)
sender = WeightSender(shards_of(model), rank=rank, num_ranks=len(endpoints))
dist.all_gather_object(endpoints, sender.endpoint)
if rank == 0:
    sys.stdout.write(" ".join(endpoints) + "\n")
    sys.stdout.flush()
for step in range(1, 4):
    model(tokens, labels=tokens).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    sender.publish(step)
signal.pause()
