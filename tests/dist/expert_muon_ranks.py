"""Muon over stacks of experts that four ranks divide in every way; run by its test.

python expert_muon_ranks.py DIRECTORY
"""

import json
import sys
from pathlib import Path

import torch
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from cosmos_parallel import MuonConfig

LAYOUTS = {
    "experts": (Shard(0), Replicate()),
    "experts-twice": (Shard(0), Shard(0)),  # three experts over four ranks: one has none
    "experts-and-rows": (Shard(0), Shard(1)),
    "experts-and-columns": (Shard(0), Shard(2)),
    "rows": (Replicate(), Shard(1)),
    "rows-and-columns": (Shard(1), Shard(2)),
}
NAMES = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
SHAPES = ((3, 8, 5), (3, 5, 8))
STEPS = 3


def tensors(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def trained(layout, mesh) -> list[torch.Tensor]:
    """Return both stacks after some steps with given gradients."""

    def laid_out(values):
        if layout is None:
            return values
        return [distribute_tensor(value, mesh, layout) for value in values]

    stacks = [nn.Parameter(value) for value in laid_out(tensors(0))]
    optimizer = MuonConfig(lr=1e-2).build(dict(zip(NAMES, stacks, strict=True)))
    for step in range(STEPS):
        for stack, gradient in zip(stacks, laid_out(tensors(step + 1)), strict=True):
            stack.grad = gradient
        optimizer.step()
    for stack in stacks:
        assert list(optimizer.state[stack]) == ["momentum_buffer"]
        assert optimizer.state[stack]["momentum_buffer"].shape == stack.shape
    return [s.full_tensor() if isinstance(s, DTensor) else s for s in stacks]


def work(rank: int, directory: Path) -> None:
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{directory / 'meeting'}", rank=rank, world_size=4
    )
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
    whole, begun = trained(None, mesh), tensors(0)
    found = {
        name: max(
            float((mine - theirs).abs().max())
            for mine, theirs in zip(trained(layout, mesh), whole, strict=True)
        )
        for name, layout in LAYOUTS.items()
    }
    found["moved"] = min(float((w - b).abs().max()) for w, b in zip(whole, begun, strict=True))
    if rank == 0:
        (directory / "found.json").write_text(json.dumps(found))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    mp.start_processes(work, args=(Path(sys.argv[1]),), nprocs=4, start_method="fork")
