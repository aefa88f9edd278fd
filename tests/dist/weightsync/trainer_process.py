"""One FSDP2 rank that trains when told, publishes when told: commands and answers are JSON lines.

Run by the tests of this folder as ``python trainer_process.py '{"rank": 0, ...}'``.
"""

import json
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, init_device_mesh

from cosmos_weightsync import SenderConfig, WeightSender, shards_of

torch.set_num_threads(1)


class Blocks(nn.Module):
    """Odd sizes, so that no shard is like another; 4 bytes per element."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(2 * width + 3, width)
        self.layers = nn.ModuleList(nn.Linear(width, 3 * width + 1) for _ in range(depth))
        self.scale = nn.Parameter(torch.ones(1))
        self.head = nn.Linear(width, 2 * width + 3, bias=False)


def build(kind: str, options: dict[str, Any]) -> nn.Module:
    torch.manual_seed(int(options.pop("seed", 0)))
    if kind == "blocks":
        return Blocks(**options)
    from transformers import AutoConfig, AutoModelForCausalLM

    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **options)).float()


def shard(model: nn.Module, mesh_shape: list[int]) -> None:
    mesh = init_device_mesh(
        "cpu", tuple(mesh_shape), mesh_dim_names=("dp", "tp")[: len(mesh_shape)]
    )
    if len(mesh_shape) == 2:
        from torch.distributed.tensor.parallel import (
            ColwiseParallel,
            RowwiseParallel,
            parallelize_module,
        )

        for name, layer in model.named_modules():
            if isinstance(layer, nn.Linear):
                style = ColwiseParallel() if "head" not in name else RowwiseParallel()
                parallelize_module(layer, mesh["tp"], style)
        mesh = mesh["dp"]
    layers = getattr(model, "layers", None) or model.model.layers
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class Rank:
    def __init__(self, setup: dict[str, Any]) -> None:
        dist.init_process_group(
            "gloo", f"file://{setup['store']}", rank=setup["rank"], world_size=setup["num_ranks"]
        )
        self.model = build(setup["model"], setup["options"])
        shard(self.model, setup.get("mesh", [setup["num_ranks"]]))
        self.sender = WeightSender(
            shards_of(self.model),
            rank=setup["rank"],
            num_ranks=setup["num_ranks"],
            config=SenderConfig(**setup.get("config", {})),
        )

    def step(self, scale: float, stride: int = 1) -> dict[str, Any]:
        """Change every element, or every n-th, as an optimizer would; replicas stay equal."""
        with torch.no_grad():
            for parameter in self.model.parameters():
                held = local(parameter).view(-1)[::stride]
                held.add_(torch.cos(held * 37.0), alpha=scale)
        return {}

    def fill(self, value: float) -> dict[str, Any]:
        with torch.no_grad():
            for parameter in self.model.parameters():
                local(parameter).fill_(value)
        return {}

    def publish(self, version: int) -> dict[str, Any]:
        started = time.monotonic()
        self.sender.publish(version)
        return {"seconds": time.monotonic() - started}

    def train(self, first: int, last: int, pause_s: float) -> dict[str, Any]:
        """Fill with the version's number and publish, again and again."""
        for version in range(first, last + 1):
            self.fill(float(version))
            self.sender.publish(version)
            time.sleep(pause_s)
        return {"newest": self.sender.newest_version}

    def save(self, path: str) -> dict[str, Any]:
        """What torch says the full tensors are; a collective."""
        full = {
            name: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()
            for name, p in self.model.named_parameters()
        }
        if dist.get_rank() == 0:
            torch.save(full, path)
        return {}

    def state(self) -> dict[str, Any]:
        return {
            "num_sessions": self.sender.num_sessions,
            "pins": [len(b.pins) for b in self.sender._snapshots._buffers],
            "endpoint": self.sender.endpoint,
            "run_id": self.sender.run_id,
            "placements": sorted(
                {str(p.placements) for p in self.model.parameters() if isinstance(p, DTensor)}
            ),
        }


def reply(answer: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def main() -> None:
    rank = Rank(json.loads(sys.argv[1]))
    reply(rank.state())
    for line in sys.stdin:
        command = json.loads(line)
        answer = getattr(rank, command.pop("do"))(**command)
        reply(answer)
    rank.sender.close()
    dist.destroy_process_group()


main()
