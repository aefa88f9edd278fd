"""Where the parts of a DTensor lie, against torch's own bookkeeping."""

from itertools import product

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from cosmos_weightsync import Box, LayoutError, ShardSpec, shards_of
from cosmos_weightsync import Shard as HeldShard
from cosmos_weightsync.shards import clean_name, held_boxes

CASES = [
    ((8, 6), (2,), (Shard(0),)),
    ((7, 3), (4,), (Shard(0),)),  # uneven: 2, 2, 2, 1
    ((3, 3), (4,), (Shard(0),)),  # the last rank holds nothing
    ((6, 8), (4,), (Shard(1),)),
    ((8, 6), (2, 2), (Replicate(), Shard(0))),  # HSDP
    ((8, 6), (2, 2), (Shard(0), Shard(0))),
    ((8, 6), (2, 2), (Shard(0), Shard(1))),  # FSDP over rows, TP over columns
    ((8, 6), (2, 2), (_StridedShard(0, split_factor=2), Shard(0))),  # FSDP over TP, both rows
    ((16, 2), (4, 2), (_StridedShard(0, split_factor=2), Shard(0))),
    ((10, 2), (2, 2), (_StridedShard(0, split_factor=2), Shard(0))),  # uneven: 3, 2 and 3, 2
    ((8, 4), (2,), (_StridedShard(0, split_factor=2),)),  # interleaved: two boxes per rank
]


def reference(shape, mesh_shape, placements, coordinate) -> list[torch.Tensor]:
    """The global index of every local element, by slicing as DTensor documents it."""
    local = torch.arange(torch.Size(shape).numel()).reshape(shape)
    for size, placement, index in zip(mesh_shape, placements, coordinate, strict=True):
        if isinstance(placement, Replicate):
            continue
        factor = getattr(placement, "split_factor", 1)
        parts = []
        for whole in local.chunk(factor, placement.dim) if factor > 1 else [local]:
            chunks = list(whole.chunk(size, placement.dim))
            empty = whole.narrow(placement.dim, 0, 0)
            parts.append(chunks[index] if index < len(chunks) else empty)
        local = torch.cat(parts, placement.dim)
    return local


@pytest.mark.parametrize(("shape", "mesh_shape", "placements"), CASES)
def test_boxes_say_where_every_local_element_belongs(shape, mesh_shape, placements):
    everything = torch.arange(torch.Size(shape).numel()).reshape(shape)
    for coordinate in product(*map(range, mesh_shape)):
        local = reference(shape, mesh_shape, placements, coordinate)
        count = 0
        for box, slices in held_boxes("w", shape, mesh_shape, placements, coordinate):
            assert torch.equal(local[slices], everything[box.relative_to(Box.full(shape))])
            count += box.numel
        assert count == local.numel()


def test_partial_sums_are_refused():
    with pytest.raises(LayoutError, match=r"w: placement .* holds no part"):
        held_boxes("w", (4,), (2,), (Partial(),), (0,))


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(4, 3)
        self.head = nn.Linear(3, 4, bias=False)
        self.head.weight = self.embed.weight


def test_a_tied_parameter_is_sent_once():
    assert [s.spec.name for s in shards_of(Tied())] == ["embed.weight"]


def test_a_tied_parameter_can_be_sent_under_each_name():
    names = [s.spec.name for s in shards_of(Tied(), tied="each")]
    assert names == ["embed.weight", "head.weight"]


def test_shards_follow_the_live_parameters():
    model = nn.Linear(2, 2)
    shards = shards_of(model)
    with torch.no_grad():
        model.weight.fill_(3.0)
    assert shards[0].tensor.tolist() == [[3.0, 3.0], [3.0, 3.0]]


def test_a_whole_tensor_is_its_full_box():
    (shard,) = shards_of([("x", torch.zeros(2, 3, dtype=torch.bfloat16))])
    assert shard.spec == ShardSpec("x", (2, 3), Box.full((2, 3)), "bfloat16")


def test_wrappers_leave_no_trace_in_names():
    wrapped = "_orig_mod.layers.0._checkpoint_wrapped_module.mlp.weight"
    assert clean_name(wrapped) == "layers.0.mlp.weight"


def test_compiled_modules_keep_their_names():
    names = [s.spec.name for s in shards_of(torch.compile(nn.Linear(2, 2), backend="eager"))]
    assert names == ["weight", "bias"]


def test_a_tensor_that_is_not_its_spec_is_refused():
    spec = ShardSpec("x", (2, 3), Box.full((2, 3)), "float32")
    with pytest.raises(LayoutError, match=r"x: the tensor is \(2, 2\) float32"):
        HeldShard(spec, torch.zeros(2, 2))


def test_dtypes_that_cannot_be_moved_are_refused():
    with pytest.raises(LayoutError, match="complex64"):
        shards_of([("x", torch.zeros(2, dtype=torch.complex64))])


def test_tensors_that_live_no_longer_than_their_pair_are_all_there():
    names = [f"t{number}" for number in range(100)]
    shards = shards_of((name, torch.zeros(2)) for name in names)
    assert [shard.spec.name for shard in shards] == names
