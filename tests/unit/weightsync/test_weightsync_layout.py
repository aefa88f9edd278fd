"""Layouts are what their ranks said, in JSON and back."""

import json
import os
import subprocess
import sys

import pytest
import torch

from cosmos_weightsync import (
    Box,
    Layout,
    LayoutError,
    ShardSpec,
    UncoveredRegionError,
    plan_transfer,
)
from cosmos_weightsync.layout import ITEM_BYTES


def spec(name: str, shape: tuple[int, ...], start: int, stop: int, dtype: str = "float32"):
    box = Box((start, *(0 for _ in shape[1:])), (stop, *shape[1:]))
    return ShardSpec(name, shape, box, dtype)


TWO_RANKS = [
    [spec("a", (4, 2), 0, 2), spec("b", (4, 2), 0, 2), spec("c", (3,), 0, 3, "int32")],
    [spec("a", (4, 2), 2, 4), spec("b", (4, 2), 2, 4)],
]


def test_a_layout_gives_back_what_each_rank_holds():
    layout = Layout.from_ranks(TWO_RANKS)
    assert [list(layout.specs_of(rank)) for rank in range(2)] == TWO_RANKS


def test_tensors_that_are_cut_alike_share_one_geometry():
    layout = Layout.from_ranks(TWO_RANKS)
    assert layout.tensors["a"].geometry == layout.tensors["b"].geometry
    assert len(layout.geometries) == 2


def test_json_keeps_everything():
    layout = Layout.from_ranks(TWO_RANKS)
    copy = Layout.from_json(json.loads(json.dumps(layout.to_json())))
    assert copy.digest() == layout.digest()
    assert [copy.specs_of(rank) for rank in range(2)] == [layout.specs_of(r) for r in range(2)]


def test_merging_the_ranks_gives_the_side():
    parts = [Layout.from_ranks([specs]) for specs in TWO_RANKS]
    assert Layout.merge(parts).digest() == Layout.from_ranks(TWO_RANKS).digest()


@pytest.mark.parametrize(
    "other",
    [
        [[spec("a", (4, 2), 0, 2)], [spec("a", (4, 2), 2, 3)]],  # another box
        [[spec("b", (4, 2), 0, 2)], [spec("b", (4, 2), 2, 4)]],  # another name
        [[spec("a", (4, 2), 0, 2, "int8")], [spec("a", (4, 2), 2, 4, "int8")]],  # another dtype
        [[spec("a", (4, 2), 2, 4)], [spec("a", (4, 2), 0, 2)]],  # other ranks
        [[spec("a", (4, 2), 0, 2)], [spec("a", (4, 2), 2, 4)], []],  # one rank more
    ],
)
def test_digests_tell_layouts_apart(other):
    layout = Layout.from_ranks([[spec("a", (4, 2), 0, 2)], [spec("a", (4, 2), 2, 4)]])
    assert Layout.from_ranks(other).digest() != layout.digest()


def test_empty_shards_hold_nothing():
    layout = Layout.from_ranks([[spec("a", (1, 2), 0, 1)], [spec("a", (1, 2), 1, 1)]])
    assert layout.specs_of(1) == ()


def test_full_specs_are_the_whole_tensors():
    names = {item.name: item.box for item in Layout.from_ranks(TWO_RANKS).full_specs()}
    assert names == {"a": Box.full((4, 2)), "b": Box.full((4, 2)), "c": Box.full((3,))}


def test_ranks_that_disagree_about_a_tensor_are_refused():
    with pytest.raises(LayoutError, match=r"a: rank 1 says \(5, 2\)"):
        Layout.from_ranks([[spec("a", (4, 2), 0, 2)], [spec("a", (5, 2), 2, 4)]])


@pytest.mark.parametrize(
    "make",
    [
        lambda: spec("a", (4, 2), 3, 5),  # leaves the tensor
        lambda: spec("a", (4, 2), 0, 2, "float3"),  # no such dtype
        lambda: ShardSpec("a", (4, 2), Box((0,), (1,)), "int8"),  # another number of dims
    ],
)
def test_impossible_specs_are_refused(make):
    with pytest.raises(LayoutError, match="a: "):
        make()


@pytest.mark.parametrize(
    "broken",
    [
        {},
        {"num_ranks": 1, "geometries": [], "tensors": [["a", "int8", 0]]},
        {
            "num_ranks": 1,
            "geometries": [{"shape": [4], "ranks": [0], "starts": [[0]], "stops": [[5]]}],
            "tensors": [],
        },
        {
            "num_ranks": 1,
            "geometries": [{"shape": [4], "ranks": [1], "starts": [[0]], "stops": [[4]]}],
            "tensors": [],
        },
    ],
)
def test_json_that_is_no_layout_is_refused(broken):
    with pytest.raises(LayoutError):
        Layout.from_json(broken)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"num_ranks": 10**18}, "1000000000000000000 ranks are not between 0 and 1048576"),
        ({"num_ranks": -1}, "-1 ranks are not between"),
        ({"num_ranks": 1.5}, r"whole numbers below 2\*\*63 are due, not 1.5"),
        ({"ranks": [0.5]}, r"whole numbers below 2\*\*63 are due, not \[0.5\]"),
        ({"shape": [1 << 40, 1 << 40]}, "no tensor has the shape"),
        ({"shape": [-4]}, "no tensor has the shape"),
        ({"tensors": [["w", "int8", 0]] * 2}, "2 tensors have 1 different names"),
    ],
)
def test_numbers_that_nobody_can_mean_are_refused(changed, message):
    cut = {"shape": [4], "ranks": [0], "starts": [[0]], "stops": [[4]]}
    whole = {"num_ranks": 1, "tensors": [["w", "int8", 0]]}
    for values in (cut, whole):
        values.update({name: changed[name] for name in values if name in changed})
    with pytest.raises(LayoutError, match=message):
        Layout.from_json({**whole, "geometries": [cut]})


def test_a_tensor_that_nobody_holds_is_offered_by_nobody():
    cut = {"shape": [4], "ranks": [], "starts": [], "stops": []}
    offered = {"num_ranks": 1, "tensors": [["w", "int8", 0]], "geometries": [cut]}
    spec = ShardSpec("w", (4,), Box.full((4,)), "int8")
    with pytest.raises(UncoveredRegionError, match=r"w .* senders offer nothing"):
        plan_transfer(Layout.from_json(offered), Layout.from_ranks([[spec]]))


def test_msgpack_keeps_everything():
    layout = Layout.from_ranks(TWO_RANKS)
    copy = Layout.from_msgpack(layout.to_msgpack())
    assert copy.digest() == layout.digest()
    assert copy.specs_of(1) == layout.specs_of(1)


@pytest.mark.parametrize("broken", [b"", b"\xc1", b"\x01", b"{}", b"\x81\xa1a\x01"])
def test_msgpack_that_is_no_layout_is_refused(broken):
    with pytest.raises(LayoutError):
        Layout.from_msgpack(broken)


_READ_AND_PLAN = """
import sys
from cosmos_weightsync import Layout, plan_transfer
layout = Layout.from_msgpack(sys.stdin.buffer.read())
plan = plan_transfer(layout, Layout.from_ranks([layout.full_specs()]))
sys.stdout.write(f"{layout.digest()} {plan.stats().total_bytes} {'torch' in sys.modules}")
"""


def test_layouts_are_read_and_planned_without_torch():
    layout = Layout.from_ranks(TWO_RANKS)
    search = os.pathsep.join(path for path in sys.path if path)
    done = subprocess.run(
        [sys.executable, "-c", _READ_AND_PLAN],
        input=layout.to_msgpack(),
        env={**os.environ, "PYTHONPATH": search},
        capture_output=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.decode().split() == [layout.digest(), str(32 + 32 + 12), "False"]


@pytest.mark.parametrize("dtype", sorted(ITEM_BYTES))
def test_sizes_are_those_of_torch(dtype):
    assert getattr(torch, dtype).itemsize == ITEM_BYTES[dtype]
