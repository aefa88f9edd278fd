"""With a topology, bytes enter a host once, come from near by, and are passed on."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cosmos_weightsync import (
    Box,
    Layout,
    Link,
    Links,
    Place,
    ShardSpec,
    Topology,
    TopologyError,
    TransferPlan,
    plan_transfer,
    simulate,
)

FREE_STARTS = Links(rail=Link(50e9), network=Link(50e9))
"""With a latency, a thousand bytes would rightly go without relays."""


def whole(name: str, shape: tuple[int, ...], ranks: int, dtype: str = "int8") -> Layout:
    return Layout.from_ranks([[ShardSpec(name, shape, Box.full(shape), dtype)]] * ranks)


def row_shards(name: str, shape: tuple[int, ...], ranks: int, dtype: str = "int8") -> Layout:
    edges = [shape[0] * rank // ranks for rank in range(ranks + 1)]
    boxes = [
        Box((low, *(0 for _ in shape[1:])), (high, *shape[1:])) for low, high in pairwise(edges)
    ]
    return Layout.from_ranks([[ShardSpec(name, shape, box, dtype)] for box in boxes])


@st.composite
def problems(draw: st.DrawFn) -> tuple[Layout, Layout, Topology]:
    """Random tiles with random duplicates, random wanted boxes, ranks on random hosts."""
    num_senders, num_receivers = draw(st.integers(1, 5)), draw(st.integers(1, 6))
    senders: list[list[ShardSpec]] = [[] for _ in range(num_senders)]
    receivers: list[list[ShardSpec]] = [[] for _ in range(num_receivers)]
    for index in range(draw(st.integers(1, 3))):
        shape = tuple(draw(st.lists(st.integers(1, 6), min_size=0, max_size=2)))
        for rank in range(num_senders):
            for low, high in [(0, 3), (3, 6)]:
                low, high = [min(edge, shape[0]) if shape else 1 for edge in (low, high)]
                box = Box((low, 0)[: len(shape)], (high, *shape[1:])[: len(shape)])
                is_held = rank == 0 or draw(st.booleans())
                if is_held and not (
                    not shape and senders[rank][-1:] and senders[rank][-1].name == f"t{index}"
                ):
                    senders[rank].append(ShardSpec(f"t{index}", shape, box, "bfloat16"))
        for rank in range(num_receivers):
            corners = [sorted((draw(st.integers(0, n)), draw(st.integers(0, n)))) for n in shape]
            box = Box(tuple(c[0] for c in corners), tuple(c[1] for c in corners))
            receivers[rank].append(ShardSpec(f"t{index}", shape, box, "bfloat16"))
    place = st.builds(Place, st.sampled_from(["a", "b", "c"]), st.integers(0, 2), st.integers(0, 1))
    topology = Topology(
        senders=tuple(draw(st.lists(place, min_size=num_senders, max_size=num_senders))),
        receivers=tuple(draw(st.lists(place, min_size=num_receivers, max_size=num_receivers))),
        relays=draw(st.sampled_from(["auto", "never"])),
        chunk_bytes=draw(st.sampled_from([1, 8, 1 << 20])),
    )
    return Layout.from_ranks(senders), Layout.from_ranks(receivers), topology


def marked(box: Box, shape: tuple[int, ...]) -> np.ndarray:
    found = np.zeros(shape, dtype=int)
    found[box.relative_to(Box.full(shape))] = 1
    return found


@given(problems())
@settings(max_examples=200, deadline=None)
def test_every_element_comes_once_along_routes_that_begin_at_holders(problem):
    senders, receivers, topology = problem
    plan = plan_transfer(senders, receivers, topology)
    counts = {
        (rank, name): np.zeros(receivers.shape_of(name), dtype=int)
        for rank in range(receivers.num_ranks)
        for name in receivers.tensors
    }
    came_from = {}
    for piece in plan.pieces():
        counts[piece.receiver, piece.name] += marked(piece.box, receivers.shape_of(piece.name))
        came_from[piece.receiver, piece.name, piece.box] = piece.source
    for piece in plan.pieces():
        # A relay gets the very same piece, and following the route back ends at a holder.
        source = piece.source
        for _ in range(receivers.num_ranks + 1):
            if source < senders.num_ranks:
                break
            source = came_from[source - senders.num_ranks, piece.name, piece.box]
        held = [s.box for s in senders.specs_of(source) if s.name == piece.name]
        assert any(box.contains(piece.box) for box in held)
        assert topology.relays == "auto" or piece.source < senders.num_ranks
    for rank in range(receivers.num_ranks):
        for item in receivers.specs_of(rank):
            np.testing.assert_array_equal(
                counts.pop((rank, item.name)), marked(item.box, item.global_shape)
            )
    assert not any(count.any() for count in counts.values())


@given(problems())
@settings(max_examples=100, deadline=None)
def test_a_host_takes_in_no_element_twice_and_none_that_it_has(problem):
    senders, receivers, topology = problem
    if topology.relays == "never":
        return
    entered: dict[tuple[str, str], np.ndarray] = {}
    places = (*topology.senders, *topology.receivers)
    for piece in plan_transfer(senders, receivers, topology).pieces():
        host = topology.receivers[piece.receiver].host
        if places[piece.source].host != host:
            shape = receivers.shape_of(piece.name)
            total = entered.setdefault((host, piece.name), np.zeros(shape, dtype=int))
            total += marked(piece.box, shape)
    for (host, name), total in entered.items():
        assert total.max() <= 1
        for rank, place in enumerate(topology.senders):
            for item in senders.specs_of(rank):
                if place.host == host and item.name == name:
                    assert not (total * marked(item.box, item.global_shape)).any()


@given(problems())
@settings(max_examples=100, deadline=None)
def test_plans_are_equal_on_all_ranks_and_edges_make_up_the_whole(problem):
    senders, receivers, topology = problem
    plan = plan_transfer(senders, receivers, topology)
    again = plan_transfer(
        Layout.from_json(senders.to_json()),
        Layout.from_json(receivers.to_json()),
        Topology.from_json(topology.to_json()),
    )
    assert plan.digest() == again.digest()
    every = plan.pieces()
    edges = plan.edge_bytes()
    for receiver in range(receivers.num_ranks):
        assert plan.pieces(receiver=receiver) == [p for p in every if p.receiver == receiver]
        used = [source for source in range(plan.num_holders) if edges[source, receiver]]
        assert list(plan.sources_of(receiver)) == used
        for source in used:
            edge = plan.pieces(source=source, receiver=receiver)
            assert edge == [p for p in every if (p.source, p.receiver) == (source, receiver)]
            assert sum(p.num_bytes for p in edge) == edges[source, receiver]
    stats = plan.stats()
    assert stats.num_pieces == len(every)
    assert stats.total_bytes == sum(p.num_bytes for p in every)
    assert stats.ratio >= 1 - 1e-9


def test_a_copy_on_the_same_device_beats_one_on_the_same_host():
    senders, receivers = whole("w", (64,), 3), whole("w", (64,), 2)
    topology = Topology(
        senders=(Place("a", 0), Place("b", 0), Place("b", 1)),
        receivers=(Place("b", 1), Place("b", 2)),
    )
    plan = plan_transfer(senders, receivers, topology)
    assert plan.sources_of(0) == (2,)
    assert plan.sources_of(1) in {(1,), (2,)}
    assert plan.stats().cross_host_bytes == 0


def test_of_two_equal_holders_that_on_the_same_rail_sends():
    senders, receivers = whole("w", (64,), 2), whole("w", (64,), 1)
    links = Links(network=Link(25e9))
    for rail in (0, 1):
        topology = Topology(
            senders=(Place("a", 0, 0), Place("b", 0, 1)),
            receivers=(Place("c", 0, rail),),
            links=links,
        )
        assert plan_transfer(senders, receivers, topology).sources_of(0) == (rail,)


def test_a_host_of_four_takes_in_a_quarter_through_each_card_and_shares_it_inside():
    # 4 tensors of 1000 bytes that all 4 ranks of one host want: 1000 bytes over each card, and
    # each rank hands its quarter to its 3 neighbours.
    names = [f"t{i}" for i in range(4)]
    specs = [ShardSpec(name, (1000,), Box.full((1000,)), "int8") for name in names]
    senders, receivers = Layout.from_ranks([specs] * 4), Layout.from_ranks([specs] * 4)
    topology = Topology.uniform(4, 4, gpus_per_host=4)
    plan = plan_transfer(senders, receivers, topology)
    edges = plan.edge_bytes()
    assert edges[:4].sum(axis=0).tolist() == [1000] * 4
    assert edges[:4].sum(axis=1).tolist() == [1000] * 4
    np.testing.assert_array_equal(edges[4:], 1000 * (1 - np.eye(4, dtype=int)))
    assert plan.stats().ratio == pytest.approx(1.0)


def test_sharded_holders_on_the_same_rail_feed_the_entry_on_it():
    # Rank r of either side is on rail r: every byte stays on its rail.
    senders, receivers = row_shards("w", (4096,), 4), whole("w", (4096,), 4)
    topology = Topology.uniform(4, 4, gpus_per_host=4)
    edges = plan_transfer(senders, receivers, topology).edge_bytes()
    np.testing.assert_array_equal(edges[:4], 1024 * np.eye(4, dtype=int))


def test_relays_form_a_chain_when_one_sender_must_reach_many_hosts():
    # 1 sender, 8 hosts, 1000 chunks: a chain takes (1000 + 8 - 1) / 1000 of one transfer.
    senders, receivers = whole("w", (1000,), 1), whole("w", (1000,), 8)
    topology = Topology(
        senders=(Place("s"),),
        receivers=tuple(Place(f"r{rank}") for rank in range(8)),
        links=FREE_STARTS,
        chunk_bytes=1,
    )
    plan = plan_transfer(senders, receivers, topology)
    assert [plan.sources_of(rank) for rank in range(8)] == [(rank,) for rank in range(8)]
    stats = plan.stats()
    assert stats.ratio == pytest.approx(1.0)
    assert stats.relayed_bytes == 7000


def test_senders_that_are_fast_enough_feed_everybody_themselves():
    # 8 senders, 8 hosts, row shards: each sender can serve 8 receivers in the time that a
    # receiver needs anyway (D * T = P), so a relay could not help.
    senders, receivers = row_shards("w", (8000,), 8), whole("w", (8000,), 8)
    topology = Topology.uniform(8, 8, gpus_per_host=1)
    plan = plan_transfer(senders, receivers, topology)
    assert plan.stats().relayed_bytes == 0
    assert plan.stats().ratio == pytest.approx(1.0)


def test_several_chains_are_fed_when_senders_have_time_for_them():
    # 4 senders can feed 4 of 8 hosts: 4 chains of 2.
    senders, receivers = row_shards("w", (8000,), 4), whole("w", (8000,), 8)
    uniform = Topology.uniform(4, 8, gpus_per_host=1)
    topology = replace(uniform, links=FREE_STARTS, chunk_bytes=100)
    plan = plan_transfer(senders, receivers, topology)
    fed = [rank for rank in range(8) if plan.sources_of(rank)[0] < 4]
    assert len(fed) == 4
    assert plan.stats().ratio == pytest.approx(1.0)


def test_few_chunks_make_a_tree():
    # One chunk, 30 hosts: a chain would take 30 transfers one after the other.
    senders, receivers = whole("w", (1000,), 1), whole("w", (1000,), 30)
    topology = Topology(
        senders=(Place("s"),),
        receivers=tuple(Place(f"r{rank}") for rank in range(30)),
        chunk_bytes=1000,
    )
    plan = plan_transfer(senders, receivers, topology)
    depth = dict.fromkeys(range(plan.num_senders), 0)
    for rank in range(30):
        depth[rank + 1] = depth[plan.sources_of(rank)[0]] + 1
    assert max(depth.values()) <= 5


def test_receivers_of_different_degrees_share_what_they_have_in_common():
    # A TP=2 replica and a TP=4 replica on one host want 1000 bytes each, which cross once.
    halves = [Box((500 * i,), (500 * i + 500,)) for i in range(2)]
    quarters = [Box((250 * i,), (250 * i + 250,)) for i in range(4)]
    receivers = Layout.from_ranks(
        [[ShardSpec("w", (1000,), box, "int8")] for box in (*halves, *quarters)]
    )
    topology = Topology.uniform(1, 6, gpus_per_host=8)
    plan = plan_transfer(whole("w", (1000,), 1), receivers, topology)
    assert plan.stats().cross_host_bytes == 1000
    assert plan.stats().total_bytes == 2000


def test_a_topology_for_other_ranks_is_refused():
    with pytest.raises(TopologyError, match=r"places 2 sender and 1 receiver ranks, .* 1 and 1"):
        plan_transfer(whole("w", (4,), 1), whole("w", (4,), 1), Topology.uniform(2, 1))


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        ({}, "not a topology"),
        ({**Topology.uniform(1, 1).to_json(), "relays": "sometimes"}, "relays must be"),
        ({**Topology.uniform(1, 1).to_json(), "chunk_bytes": 0}, "chunk_bytes"),
        ({**Topology.uniform(1, 1).to_json(), "senders": [["a", 0]]}, "not a topology"),
    ],
)
def test_nonsense_is_not_read_as_a_topology(data, reason):
    with pytest.raises(TopologyError, match=reason):
        Topology.from_json(data)


def test_a_link_needs_a_bandwidth():
    with pytest.raises(TopologyError, match="bytes_per_s > 0"):
        Link(0.0)


@pytest.mark.parametrize(
    "link",
    [{"bytes_per_s": 1e308}, {"bytes_per_s": 1e-308}, {"bytes_per_s": 1e9, "piece_s": 1e300}],
)
def test_links_that_no_plan_can_reckon_with_are_refused(link):
    with pytest.raises(TopologyError, match=r"a link needs .*1e\+30"):
        plan_over({"rail": link})


@pytest.mark.parametrize("bytes_per_s", [1e-30, 1e30])
@pytest.mark.parametrize("piece_s", [0.0, 1e30])
def test_a_link_as_slow_or_as_fast_as_any_is_planned_with(bytes_per_s, piece_s):
    plan = plan_over({"rail": {"bytes_per_s": bytes_per_s, "piece_s": piece_s}})
    assert 0 < simulate(plan).seconds < float("inf")


def plan_over(links: dict[str, dict[str, float]]) -> TransferPlan:
    """Plan a tensor from two ranks to sixteen on other hosts."""
    topology = Topology.uniform(2, 16, gpus_per_host=4, links=Links.from_json(links))
    return plan_transfer(whole("w", (1 << 20,), 2), whole("w", (1 << 20,), 16), topology)
