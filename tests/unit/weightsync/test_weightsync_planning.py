"""A plan moves every wanted element exactly once, from a rank that holds it."""

import tracemalloc
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cosmos_weightsync import (
    Box,
    Layout,
    ShardSpec,
    UncoveredRegionError,
    UnknownTensorError,
    plan_transfer,
)


def layout(*ranks: list[tuple[str, tuple[int, ...], Box]], dtype: str = "float32") -> Layout:
    return Layout.from_ranks(
        [[ShardSpec(name, shape, box, dtype) for name, shape, box in rank] for rank in ranks]
    )


def rows(name: str, shape: tuple[int, ...], start: int, stop: int):
    rest = shape[1:]
    return name, shape, Box((start, *(0 for _ in rest)), (stop, *rest))


def cuts(draw: st.DrawFn, extent: int, parts: int) -> list[tuple[int, int]]:
    inner = sorted(draw(st.lists(st.integers(0, extent), min_size=parts - 1, max_size=parts - 1)))
    edges = [0, *inner, extent]
    return list(pairwise(edges))


@st.composite
def sides(draw: st.DrawFn) -> tuple[Layout, Layout]:
    """Senders that cover every tensor (tiles, some of them held twice, some boxes overlapping),
    receivers that want arbitrary boxes."""
    num_senders, num_receivers = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    senders: list[list[ShardSpec]] = [[] for _ in range(num_senders)]
    receivers: list[list[ShardSpec]] = [[] for _ in range(num_receivers)]
    for index in range(draw(st.integers(1, 3))):
        shape = tuple(draw(st.lists(st.integers(1, 6), min_size=0, max_size=3)))
        dtype = draw(st.sampled_from(["float32", "bfloat16", "int8"]))
        name = f"t{index}"
        grid = [cuts(draw, extent, draw(st.integers(1, 3))) for extent in shape]
        tiles: list[list[tuple[int, int]]] = [[]]
        for side in grid:
            tiles = [[*tile, interval] for tile in tiles for interval in side]
        boxes = [Box(tuple(i[0] for i in t), tuple(i[1] for i in t)) for t in tiles]
        boxes += [draw(st.sampled_from(boxes)), Box.full(shape)][: draw(st.integers(0, 2))]
        for box in boxes:
            rank = draw(st.integers(0, num_senders - 1))
            item = ShardSpec(name, shape, box, dtype)
            if item not in senders[rank]:
                senders[rank].append(item)
        for rank in range(num_receivers):
            corners = [sorted((draw(st.integers(0, n)), draw(st.integers(0, n)))) for n in shape]
            box = Box(tuple(c[0] for c in corners), tuple(c[1] for c in corners))
            receivers[rank].append(ShardSpec(name, shape, box, dtype))
    return Layout.from_ranks(senders), Layout.from_ranks(receivers)


@given(sides())
@settings(max_examples=150, deadline=None)
def test_every_wanted_element_comes_once_and_from_a_holder(pair):
    senders, receivers = pair
    plan = plan_transfer(senders, receivers)
    counts = {
        (rank, name): np.zeros(receivers.shape_of(name), dtype=int)
        for rank in range(receivers.num_ranks)
        for name in receivers.tensors
    }
    for piece in plan.pieces():
        held = [s.box for s in senders.specs_of(piece.source) if s.name == piece.name]
        assert any(box.contains(piece.box) for box in held)
        counts[piece.receiver, piece.name][
            piece.box.relative_to(Box.full(receivers.shape_of(piece.name)))
        ] += 1
    for rank in range(receivers.num_ranks):
        for name in receivers.tensors:
            want = np.zeros(receivers.shape_of(name), dtype=int)
            for item in receivers.specs_of(rank):
                if item.name == name:
                    want[item.box.relative_to(Box.full(item.global_shape))] = 1
            np.testing.assert_array_equal(counts[rank, name], want)


@given(sides())
@settings(max_examples=50, deadline=None)
def test_both_sides_compute_the_same_plan_and_the_edges_make_up_the_whole(pair):
    senders, receivers = pair
    plan, again = (
        plan_transfer(senders, receivers),
        plan_transfer(Layout.from_json(senders.to_json()), Layout.from_json(receivers.to_json())),
    )
    assert plan.digest() == again.digest()
    assert plan.pieces() == again.pieces()
    for sender in range(senders.num_ranks):
        for receiver in range(receivers.num_ranks):
            edge = plan.pieces(source=sender, receiver=receiver)
            assert edge == [
                p for p in plan.pieces() if (p.source, p.receiver) == (sender, receiver)
            ]
            assert sum(p.num_bytes for p in edge) == plan.edge_bytes()[sender, receiver]
    assert plan.stats().num_pieces == len(plan.pieces())


def test_row_shards_meet_column_shards_in_four_blocks():
    shape = (4, 6)
    senders = layout([rows("w", shape, 0, 2)], [rows("w", shape, 2, 4)])
    receivers = layout([("w", shape, Box((0, 0), (4, 3)))], [("w", shape, Box((0, 3), (4, 6)))])
    found = {(p.source, p.receiver, p.box) for p in plan_transfer(senders, receivers).pieces()}
    assert found == {
        (0, 0, Box((0, 0), (2, 3))),
        (0, 1, Box((0, 3), (2, 6))),
        (1, 0, Box((2, 0), (4, 3))),
        (1, 1, Box((2, 3), (4, 6))),
    }


def test_duplicate_holders_share_the_bytes():
    # 4 replicas of 100 equal tensors of 400 bytes, one receiver: 10,000 bytes each.
    names = [rows(f"t{i}", (10, 10), 0, 10) for i in range(100)]
    plan = plan_transfer(layout(names, names, names, names), layout(names))
    assert plan.edge_bytes()[:4, 0].tolist() == [10_000] * 4


def test_one_large_tensor_is_shared_out_between_its_holders():
    whole = [rows("w", (4096, 512), 0, 4096)]  # 8 MiB
    plan = plan_transfer(layout(whole, whole), layout(whole))
    assert plan.edge_bytes()[:2, 0].tolist() == [4 << 20, 4 << 20]


def test_a_rank_with_work_of_its_own_gets_less_of_the_shared_work():
    lone = rows("lone", (100,), 0, 100)  # 400 bytes that only rank 0 has
    shared = [rows(f"s{i}", (100,), 0, 100) for i in range(3)]
    plan = plan_transfer(layout([lone, *shared], shared), layout([lone, *shared]))
    assert plan.edge_bytes()[:2, 0].tolist() == [800, 800]


def test_pieces_travel_in_the_order_of_the_receivers_tensors():
    shape = (2, 2)
    senders = layout([rows("a", shape, 0, 2), rows("b", shape, 0, 2), rows("c", (3,), 0, 3)])
    receivers = layout([rows("c", (3,), 0, 3), rows("b", shape, 0, 2), rows("a", shape, 0, 2)])
    assert [p.name for p in plan_transfer(senders, receivers).pieces()] == ["c", "b", "a"]


def test_a_gap_names_the_tensor_the_receiver_and_the_region():
    senders = layout([rows("w", (8, 2), 0, 2)], [rows("w", (8, 2), 4, 8)])
    receivers = layout([], [rows("w", (8, 2), 1, 8)])
    with pytest.raises(
        UncoveredRegionError,
        match=r"w \(8, 2\): receiver 1 needs \[1:8, 0:2\], of which \[2:4, 0:2\] is not offered; "
        r"senders offer \[0:2, 0:2\], \[4:8, 0:2\]",
    ):
        plan_transfer(senders, receivers)


def test_an_unknown_tensor_is_named_with_a_similar_one():
    senders = layout([rows("model.norm.weight", (8,), 0, 8)])
    with pytest.raises(UnknownTensorError, match=r"norm.weight: .* such as model.norm.weight"):
        plan_transfer(senders, layout([rows("norm.weight", (8,), 0, 8)]))


def test_another_shape_is_refused():
    senders = layout([rows("w", (8,), 0, 8)])
    with pytest.raises(UnknownTensorError, match=r"w: receivers want shape \(9,\), senders have"):
        plan_transfer(senders, layout([rows("w", (9,), 0, 9)]))


def test_planning_looks_at_distinct_cuts_only():
    # 64 ranks, 3,000 tensors that are cut alike: one class, whatever their number.
    tile = [[rows(f"t{i}", (64, 2), r, r + 1) for i in range(3000)] for r in range(64)]
    whole = [rows(f"t{i}", (64, 2), 0, 64) for i in range(3000)]
    plan = plan_transfer(layout(*tile), layout(whole))
    assert len(plan.classes) == 1
    assert plan.stats().num_pieces == 64 * 3000
    assert plan.stats().imbalance == 1.0


def test_memory_grows_with_the_ranks_and_not_with_their_pairs():
    """Of four times as many ranks a table of pairs would be sixteen times as large."""

    def peak(num_ranks: int) -> int:
        shape = (num_ranks, 8)
        senders = layout([rows("w", shape, 0, num_ranks)])
        receivers = layout(*([rows("w", shape, rank, rank + 1)] for rank in range(num_ranks)))
        tracemalloc.start()
        try:
            stats = plan_transfer(senders, receivers).stats()
            assert (stats.num_edges, stats.num_pieces) == (num_ranks, num_ranks)
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    peak(10)  # what is made once
    assert peak(1200) < 5 * peak(300)
