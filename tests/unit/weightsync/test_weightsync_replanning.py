"""After a death only what came from the dead changes its source; newcomers get it from anybody."""

from dataclasses import replace

import numpy as np
import pytest

from cosmos_weightsync import (
    Box,
    Layout,
    Link,
    Links,
    Place,
    ShardSpec,
    Topology,
    UncoveredRegionError,
    plan_join,
    plan_transfer,
    replan_without,
)

NAMES = [f"t{i}" for i in range(12)]


def whole(ranks: int, names=NAMES) -> Layout:
    return Layout.from_ranks(
        [[ShardSpec(name, (64,), Box.full((64,)), "int8") for name in names]] * ranks
    )


def sharded(ranks: int, copies: int = 1) -> Layout:
    width = 64 // ranks
    boxes = [Box((width * rank,), (width * rank + width,)) for rank in range(ranks)] * copies
    return Layout.from_ranks(
        [[ShardSpec(name, (64,), box, "int8") for name in NAMES] for box in boxes]
    )


def chain(num_receivers: int) -> Topology:
    return Topology(
        senders=(Place("s"),),
        receivers=tuple(Place(f"r{rank}") for rank in range(num_receivers)),
        links=Links(
            rail=Link(50e9), network=Link(50e9)
        ),  # a start that costs nothing, or a few bytes go directly
        chunk_bytes=1,
    )


def sources(plan) -> dict:
    return {(p.name, p.box, p.receiver): p.source for p in plan.pieces()}


def test_the_receiver_behind_a_dead_relay_takes_from_the_one_before_it():
    plan = plan_transfer(whole(1), whole(4), chain(4))
    assert [plan.sources_of(rank) for rank in range(4)] == [(0,), (1,), (2,), (3,)]
    after = replan_without(plan, {2})  # Receiver 1.
    assert [after.sources_of(rank) for rank in range(4)] == [(0,), (), (1,), (3,)]


def test_two_dead_relays_in_a_row_are_bridged():
    plan = plan_transfer(whole(1), whole(4), chain(4))
    after = replan_without(plan, {1, 2})
    assert [after.sources_of(rank) for rank in range(4)] == [(), (), (0,), (3,)]


def test_what_a_dead_sender_sent_is_shared_out_between_the_other_holders():
    # 3 copies of 2 shards; 32 bytes of each of 12 tensors are shared by ranks 0, 2 and 4.
    plan = plan_transfer(sharded(2, copies=3), whole(1))
    assert plan.edge_bytes()[:6, 0].tolist() == [128] * 6
    after = replan_without(plan, {2})
    assert after.edge_bytes()[:6, 0].tolist() == [192, 128, 0, 128, 192, 128]
    before_it, after_it = sources(plan), sources(after)
    assert before_it.keys() == after_it.keys()
    changed = {key for key in before_it if before_it[key] != after_it[key]}
    assert {before_it[key] for key in changed} == {2}


def test_what_only_the_dead_had_is_named():
    plan = plan_transfer(sharded(2), whole(3))
    with pytest.raises(
        UncoveredRegionError, match=r"t0: nobody alive has \[32:64\], .*\[0, 1, 2\]"
    ):
        replan_without(plan, {1})


def test_a_receiver_that_committed_stands_in_for_a_dead_sender():
    plan = plan_transfer(sharded(2), whole(3))
    after = replan_without(plan, {1}, committed={2})
    assert [after.sources_of(rank) for rank in range(3)] == [(0, 4), (0, 4), ()]
    assert after.edge_bytes()[4].tolist() == [32 * 12, 32 * 12, 0]


@pytest.mark.parametrize("seed", range(20))
def test_survivors_still_get_every_piece_once_from_living_holders(seed):
    rng = np.random.default_rng(seed)
    topology = Topology.uniform(8, 12, gpus_per_host=int(rng.choice([1, 2, 4])))
    topology = replace(topology, chunk_bytes=int(rng.choice([1, 8, 1000])))
    plan = plan_transfer(sharded(4, copies=2), whole(12), topology)
    dead = {int(rng.integers(8)), *(8 + rng.choice(12, 4, replace=False)).tolist()}
    before, after = sources(plan), sources(replan_without(plan, dead))
    assert set(after) == {key for key in before if 8 + key[2] not in dead}
    for (name, box, receiver), source in after.items():
        assert source not in dead
        if before[name, box, receiver] not in dead:
            assert source == before[name, box, receiver]
        for _ in range(13):  # Back along the route to a sender.
            source = source if source < 8 else after[name, box, source - 8]
        assert source < 8


def test_a_newcomer_of_another_degree_is_served_by_receivers_when_all_senders_are_dead():
    # Two receivers hold halves; the newcomer wants thirds of everything on 3 ranks.
    halves = sharded(2)
    thirds = Layout.from_ranks(
        [
            [ShardSpec(name, (64,), Box((low,), (high,)), "int8") for name in NAMES]
            for low, high in [(0, 21), (21, 42), (42, 64)]
        ]
    )
    plan = plan_join((whole(1), halves), thirds, {1, 2})
    assert [plan.sources_of(rank) for rank in range(3)] == [(1,), (1, 2), (2,)]
    assert plan.stats().total_bytes == 64 * 12


def test_a_newcomer_takes_from_a_receiver_on_its_host_rather_than_from_the_sender():
    topology = Topology(
        senders=(Place("trainer"), Place("a", 0), Place("b", 0)), receivers=(Place("b", 1, 1),)
    )
    plan = plan_join((whole(1), whole(2)), whole(1), {0, 1, 2}, topology)
    assert plan.sources_of(0) == (2,)
