"""What a trainer's weight source declares, read as shards: vLLM 0.32's interface and 0.33's.

The sources here are written against the interfaces, since only one of the two can be installed;
with vLLM installed, its own ``ModuleSource`` is read too (tests/dist).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import pytest
import torch
from torch import Tensor, nn

from cosmos_weightsync import Box, Layout, Shard
from cosmos_weightsync.integrations import vllm_source_032, vllm_source_033

FULL = {
    "embed": torch.arange(70.0).reshape(10, 7),
    "fused": torch.arange(48.0).reshape(6, 8),
    "norm": torch.arange(7.0),
}


class GatheringSource:
    """0.32: ``metadata()``, and full tensors by iteration."""

    def metadata(self) -> list[str]:
        return list(FULL)

    def held_names(self) -> None:
        return None

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        yield from FULL.items()


@dataclass
class ModuleSource:
    """0.32: as above, over a module."""

    _module: nn.Module

    def metadata(self) -> list[str]:
        return [name for name, _ in self._module.named_parameters()]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        raise AssertionError("nothing needs to be gathered")


@dataclass(frozen=True)
class Cut:
    """0.33's ``Shard``."""

    dim: int


@dataclass(frozen=True)
class Same:
    """0.33's ``Replicate``."""


@dataclass(frozen=True)
class Meta:
    """0.33's ``ParamMeta``."""

    name: str
    shape: tuple[int, ...]
    owners: tuple[int, ...] | None = None
    mesh_shape: tuple[int, ...] | None = None
    placements: tuple[Cut | Same, ...] | None = None


@dataclass
class DeclaringSource:
    """0.33: owners and placements for every tensor; two FSDP ranks by two tensor ranks."""

    rank: int
    is_local: bool

    @cached_property
    def metadata(self) -> list[Meta]:
        mesh = ((0, 1, 2, 3), (2, 2))
        return [
            Meta("embed", (10, 7), *mesh, (Cut(0), Same())),
            Meta("fused", (6, 8), *mesh, (Cut(1), Cut(0))),
            Meta("norm", (7,)),
        ]

    def implements_iter_local(self) -> bool:
        return self.is_local

    def iter_full(self) -> Iterator[tuple[str, Tensor]]:
        yield from FULL.items()

    def iter_local(self) -> Iterator[tuple[str, Tensor]]:
        data, tensor = divmod(self.rank, 2)
        yield "embed", FULL["embed"].chunk(2)[data]
        yield "fused", FULL["fused"].chunk(2, dim=1)[data].chunk(2)[tensor]
        yield "norm", FULL["norm"]


def check_values(shards: tuple[Shard, ...]) -> None:
    for shard in shards:
        whole = FULL[shard.spec.name]
        region = whole[shard.spec.box.relative_to(Box.full(whole.shape))]
        assert torch.equal(shard.tensor, region)


def test_a_source_of_032_is_gathered_and_each_tensor_kept_by_one_rank():
    held = [vllm_source_032.shards_of_source(GatheringSource(), rank, 2) for rank in range(2)]
    assert [[shard.spec.name for shard in one] for one in held] == [["embed", "norm"], ["fused"]]
    for one in held:
        check_values(one)


def test_a_module_source_of_032_is_viewed_and_not_gathered():
    module = nn.Linear(4, 3)
    shards = vllm_source_032.shards_of_source(ModuleSource(module), 0, 1)
    assert [shard.spec.name for shard in shards] == ["weight", "bias"]
    assert shards[0].tensor.data_ptr() == module.weight.data_ptr()


def test_a_local_source_of_033_says_where_its_parts_lie():
    ranks = [
        vllm_source_033.shards_of_source(DeclaringSource(rank, is_local=True), rank, 4)
        for rank in range(4)
    ]
    for one in ranks:
        check_values(one)
    boxes = [
        {shard.spec.name: (shard.spec.box.start, shard.spec.box.stop) for shard in one}
        for one in ranks
    ]
    assert boxes[3]["embed"] == ((5, 0), (10, 7))
    assert boxes[1]["fused"] == ((3, 0), (6, 4))
    assert [("norm" in one) for one in boxes] == [False, False, True, False]  # The third tensor.
    layout = Layout.from_ranks([[shard.spec for shard in one] for one in ranks])
    assert layout.shape_of("fused") == (6, 8)


def test_a_source_of_033_with_full_tensors_only_is_gathered():
    shards = vllm_source_033.shards_of_source(DeclaringSource(0, is_local=False), 0, 1)
    assert {shard.spec.name: shard.spec.box.shape for shard in shards} == {
        "embed": (10, 7),
        "fused": (6, 8),
        "norm": (7,),
    }
    check_values(shards)


@pytest.mark.parametrize(
    ("source", "versions"),
    [(GatheringSource(), (True, False)), (DeclaringSource(0, is_local=True), (False, True))],
)
def test_each_interface_is_told_apart(source, versions):
    assert (vllm_source_032.applies(source), vllm_source_033.applies(source)) == versions
