"""The models of the weight-sync benchmark, as four FSDP ranks hold them and as a TP=2 worker does.

One has the shapes of a Llama-like model of 1 G parameters (183 tensors at 1970 MiB), the other
those of Granite 3.0 1B-A400M, a mixture of 32 experts a layer, with a tensor for each matrix of an
expert (1,754). The attention output and the down projections are cut by columns for tensor
parallelism, norms and routers are not cut, and everything else by rows.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from cosmos_weightsync import Box, ShardSpec

NUM_SENDERS = 4
NUM_RECEIVERS = 2
Shapes = dict[str, tuple[int, ...]]
BY_COLUMNS = ("o_proj", "down_proj")
WHOLE = ("norm", "router")


def _layer(width: int, keys: int) -> Shapes:
    return {
        "q_proj": (width, width),
        "k_proj": (keys, width),
        "v_proj": (keys, width),
        "o_proj": (width, width),
        "input_norm": (width,),
        "post_norm": (width,),
    }


def _feed_forward(width: int, inner: int) -> Shapes:
    return {
        "gate_proj": (inner, width),
        "up_proj": (inner, width),
        "down_proj": (width, inner),
    }


def _ends(width: int, vocabulary: int) -> Shapes:
    return {"embed": (vocabulary, width), "norm": (width,), "lm_head": (vocabulary, width)}


NUM_EXPERTS = 32
LAYERS: dict[str, Shapes] = {
    "dense": _layer(2048, 512) | _feed_forward(2048, 5632),
    "mixture": _layer(1024, 512)
    | {"router": (NUM_EXPERTS, 1024)}
    | {
        f"experts.{expert}.{name}": shape
        for expert in range(NUM_EXPERTS)
        for name, shape in _feed_forward(1024, 512).items()
    },
}
ENDS: dict[str, Shapes] = {"dense": _ends(2048, 32000), "mixture": _ends(1024, 49152)}


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """Which model, and how many of its layers: as many as make about ``mib`` MiB in bfloat16."""

    model: Literal["dense", "mixture"]
    mib: int

    def shapes(self) -> Shapes:
        """Every tensor, by name; the dense model has 20 layers at 1970 MiB."""
        layer = LAYERS[self.model]
        ends = {
            name: shape
            for name, shape in ENDS[self.model].items()
            if self.mib >= 500 or name == "norm"
        }
        per_layer = sum(2 * torch.Size(shape).numel() for shape in layer.values())
        rest = (self.mib << 20) - sum(2 * torch.Size(shape).numel() for shape in ends.values())
        found: Shapes = {}
        for number in range(max(1, round(rest / per_layer))):
            found |= {f"layers.{number}.{name}": shape for name, shape in layer.items()}
        return found | ends

    def num_bytes(self) -> int:
        return 2 * sum(torch.Size(shape).numel() for shape in self.shapes().values())


class Trained(nn.Module):
    """The model as FSDP2 shards it, in bfloat16, with values that depend on place only."""

    def __init__(self, size: Size, mesh: DeviceMesh) -> None:
        super().__init__()
        with torch.device("meta"):
            self.parts = nn.ModuleDict(
                {
                    name.replace(".", "/"): nn.ParameterList(
                        [nn.Parameter(torch.empty(shape, dtype=torch.bfloat16))]
                    )
                    for name, shape in size.shapes().items()
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


def whole_values(size: Size) -> Iterator[tuple[str, Tensor]]:
    """Every tensor as `Trained` has it on all ranks together: each rank draws its own rows."""
    generators = [torch.Generator().manual_seed(rank) for rank in range(NUM_SENDERS)]
    for name, shape in size.shapes().items():
        whole = torch.empty(shape, dtype=torch.bfloat16)
        for rows, generator in zip(whole.chunk(NUM_SENDERS), generators, strict=False):
            rows.normal_(generator=generator)
        yield name, whole


def wanted_box(name: str, shape: tuple[int, ...], rank: int) -> Box:
    """What rank ``rank`` of two tensor-parallel workers holds of a tensor."""
    if name.endswith(WHOLE):
        return Box.full(shape)
    dim = 1 if name.endswith(BY_COLUMNS) else 0
    half = shape[dim] // NUM_RECEIVERS
    start, stop = [0, 0], list(shape)
    start[dim], stop[dim] = rank * half, (rank + 1) * half
    return Box(tuple(start), tuple(stop))


def wanted_specs(size: Size, rank: int) -> list[ShardSpec]:
    """Everything that a worker holds."""
    return [
        ShardSpec(name, shape, wanted_box(name, shape, rank), "bfloat16")
        for name, shape in size.shapes().items()
    ]


def carve(flat: Tensor, specs: list[ShardSpec]) -> dict[str, Tensor]:
    """One tensor for each spec, one after the other in a flat bfloat16 tensor."""
    found, start = {}, 0
    for spec in specs:
        found[spec.name] = flat[start : start + spec.box.numel].view(spec.box.shape)
        start += spec.box.numel
    return found
