"""The memory that versions land in, of a receiver that serves nobody and of one that serves."""

import io
import re
from pathlib import Path

import pytest
import torch

from cosmos_weightsync import Box, ShardSpec
from cosmos_weightsync.layout import Layout
from cosmos_weightsync.wanted import WantedWeights

SHAPES = {"large": (2048, 1536), "halves": (7, 3), "one": (), "none": (0, 4)}
SPECS = [
    ShardSpec(name, shape, Box.full(shape), "bfloat16" if name == "halves" else "float32")
    for name, shape in SHAPES.items()
]


def landed(memory: str) -> dict[str, torch.Tensor]:
    wanted = WantedWeights(SPECS, "staged", memory)
    shards, arena = wanted.place(wanted.on_wire(Layout.from_ranks([SPECS])))
    assert (arena is not None) == (memory == "shared")
    return {shard.spec.name: shard.tensor for shard in shards}


@pytest.mark.parametrize("memory", ["private", "shared"])
def test_each_region_has_memory_of_its_own(memory):
    found = landed(memory)
    for number, tensor in enumerate(found.values()):
        tensor.fill_(number)
    for number, (name, tensor) in enumerate(found.items()):
        assert tensor.shape == SHAPES[name]
        assert tensor.eq(number).all()
        assert (tensor.dtype == torch.bfloat16) == (name == "halves")


def test_what_serves_nobody_is_saved_without_the_others():
    found = landed("private")
    for tensor in found.values():
        saved = io.BytesIO()
        torch.save(tensor, saved)
        assert saved.tell() < tensor.nbytes + 4096


def test_what_serves_nobody_lies_in_huge_pages_where_there_are_any():
    found = landed("private")
    place = found["large"].data_ptr()
    for area in re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text()):
        start, stop = (int(bound, 16) for bound in area.split(" ", 1)[0].split("-"))
        if start <= place < stop:
            assert "hg" in area.split("VmFlags:")[1].split()  # Asked for; they need not be there.
            return
    raise AssertionError("the memory is in no area of this process")
