"""The model of the weight-sync benchmark, as four FSDP ranks hold it and as a TP=2 worker wants it.

The shapes are those of a Llama-like model of 1 G parameters: 183 tensors, of which the attention
output and the MLP's down projection are cut by columns for tensor parallelism, the norms are not
cut, and everything else by rows.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from cosmos_weightsync import Box, ShardSpec

NUM_SENDERS = 4
NUM_RECEIVERS = 2
WIDTH, KEYS, INNER, VOCABULARY = 2048, 512, 5632, 32000
LAYER = {
    "q_proj": (WIDTH, WIDTH),
    "k_proj": (KEYS, WIDTH),
    "v_proj": (KEYS, WIDTH),
    "o_proj": (WIDTH, WIDTH),
    "gate_proj": (INNER, WIDTH),
    "up_proj": (INNER, WIDTH),
    "down_proj": (WIDTH, INNER),
    "input_norm": (WIDTH,),
    "post_norm": (WIDTH,),
}
BY_COLUMNS = ("o_proj", "down_proj")
ENDS = {"embed": (VOCABULARY, WIDTH), "norm": (WIDTH,), "lm_head": (VOCABULARY, WIDTH)}


def shapes(mib: int) -> dict[str, tuple[int, ...]]:
    """Every tensor of a model of about so many MiB in bfloat16; at 1970 it has 20 layers."""
    per_layer = sum(2 * torch.Size(shape).numel() for shape in LAYER.values())
    ends = {name: shape for name, shape in ENDS.items() if mib >= 500 or name == "norm"}
    rest = (mib << 20) - sum(2 * torch.Size(shape).numel() for shape in ends.values())
    found: dict[str, tuple[int, ...]] = {}
    for layer in range(max(1, round(rest / per_layer))):
        found |= {f"layers.{layer}.{name}": shape for name, shape in LAYER.items()}
    return found | ends


class Trained(nn.Module):
    """The model as FSDP2 shards it, in bfloat16, with values that depend on place only."""

    def __init__(self, mib: int, mesh: DeviceMesh) -> None:
        super().__init__()
        with torch.device("meta"):
            self.parts = nn.ModuleDict(
                {
                    name.replace(".", "/"): nn.ParameterList(
                        [nn.Parameter(torch.empty(shape, dtype=torch.bfloat16))]
                    )
                    for name, shape in shapes(mib).items()
                }
            )
        for part in self.parts.values():
            fully_shard(part, mesh=mesh)
        self.to_empty(device="cpu")
        generator = torch.Generator().manual_seed(mesh.get_rank())
        with torch.no_grad():
            for _, parameter in self.named_tensors():
                parameter.to_local().normal_(generator=generator)

    def named_tensors(self) -> Iterator[tuple[str, DTensor]]:
        """Every parameter under its name."""
        parts: Any = self.parts
        for name, part in parts.items():
            yield name.replace("/", "."), part[0]


def wanted_box(name: str, shape: tuple[int, ...], rank: int) -> Box:
    """What rank ``rank`` of two tensor-parallel workers holds of a tensor."""
    if len(shape) == 1:
        return Box.full(shape)
    dim = 1 if name.endswith(BY_COLUMNS) else 0
    half = shape[dim] // NUM_RECEIVERS
    start, stop = [0, 0], list(shape)
    start[dim], stop[dim] = rank * half, (rank + 1) * half
    return Box(tuple(start), tuple(stop))


def wanted_specs(mib: int, rank: int) -> list[ShardSpec]:
    """Everything that a worker holds."""
    return [
        ShardSpec(name, shape, wanted_box(name, shape, rank), "bfloat16")
        for name, shape in shapes(mib).items()
    ]


def carve(flat: Tensor, specs: list[ShardSpec]) -> dict[str, Tensor]:
    """One tensor for each spec, one after the other in a flat bfloat16 tensor."""
    found, start = {}, 0
    for spec in specs:
        found[spec.name] = flat[start : start + spec.box.numel].view(spec.box.shape)
        start += spec.box.numel
    return found
