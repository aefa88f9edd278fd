"""Simulated times are those worked out by hand, and no byte is lost or made up."""

from dataclasses import replace

import numpy as np
import pytest

from cosmos_weightsync import (
    Box,
    Failure,
    Layout,
    Link,
    Links,
    Place,
    ShardSpec,
    Topology,
    TopologyError,
    plan_transfer,
    simulate,
)
from cosmos_weightsync.fluid import FairRates, Flows

# Every link moves 100 bytes a second, at once: 10,000 bytes take 100 s.
LINKS = Links(device=Link(100.0), host=Link(100.0), rail=Link(100.0), network=Link(100.0))
SIZE = 10_000


def whole(ranks: int) -> Layout:
    return Layout.from_ranks([[ShardSpec("w", (SIZE,), Box.full((SIZE,)), "int8")]] * ranks)


def hosts(num_senders: int, num_receivers: int, **changes: object) -> Topology:
    topology = Topology.uniform(num_senders, num_receivers, gpus_per_host=1, links=LINKS)
    return replace(topology, **{"chunk_bytes": 100, **changes})


def run(topology: Topology, **arguments):
    plan = plan_transfer(whole(len(topology.senders)), whole(len(topology.receivers)), topology)
    return simulate(plan, **arguments)


@pytest.mark.parametrize(
    ("topology", "seconds"),
    [
        (hosts(1, 1), 100.0),
        (hosts(4, 1), 100.0),  # The receiver's card is the limit.
        (hosts(1, 8, relays="never"), 800.0),  # A star: 8 copies over one card.
        (hosts(1, 8), 107.0),  # A chain of 8, K = 100 chunks: (K + 8 - 1) / K of 100 s.
        (hosts(1, 8, chunk_bytes=10), 100.7),  # K = 1000.
        (hosts(2, 4, relays="never"), 200.0),  # Two cards share four copies.
        # One chunk, 2 hosts: a chain of two whole transfers, or both at half speed.
        (hosts(1, 2, chunk_bytes=SIZE), 200.0),
        # One chunk, 6 hosts. Binary tree, 1 + 2 + 3: each step halves the rate of the feeder.
        (hosts(1, 6, chunk_bytes=SIZE), 400.0),
    ],
)
def test_the_time_is_that_of_the_formula(topology, seconds):
    assert run(topology).seconds == pytest.approx(seconds, rel=2e-3)


def test_latency_is_paid_at_every_hop_and_registration_once():
    slow = replace(LINKS, rail=Link(100.0, 3.0), network=Link(100.0, 3.0))
    slow = replace(slow, registration_s_per_gib=5.0 * (1 << 30) / SIZE)
    # Register 5 s, ask 3 s, 100 s of bytes; each further hop is one chunk (1 s) and 3 s later.
    assert run(hosts(1, 3, links=slow)).finish_s == pytest.approx([108.0, 112.0, 116.0])


def test_a_relay_fed_slowly_passes_on_slowly():
    # Receiver 0 shares its host with the sender's link at 50 bytes/s; the rail does 100.
    links = replace(LINKS, rail=Link(100.0), network=Link(50.0))
    topology = Topology(
        senders=(Place("s", 0, 0),),
        receivers=(Place("a", 0, 1), Place("b", 0, 1)),
        links=links,
        chunk_bytes=100,
    )
    # 200 s at 50 bytes/s; the second is one chunk behind, at 100 bytes/s.
    assert run(topology).finish_s == pytest.approx([200.0, 201.0])


def test_a_dead_relay_costs_the_detection_and_nothing_more():
    topology = hosts(1, 4)
    found = run(topology, failures=[Failure(holder=2, at_s=50.0)], detect_s=1.0)
    # Receiver 1 dies. Receiver 2 had bytes up to chunk 48 and takes the other 52 from receiver 0
    # from 51 s on; receiver 3 is one chunk behind it.
    assert found.recovered
    assert found.dead == (2,)
    assert found.finish_s[[0, 2, 3]] == pytest.approx([100.0, 103.0, 104.0])


def test_nobody_recovers_from_the_death_of_the_only_holder():
    found = run(hosts(1, 3), failures=[Failure(holder=0, at_s=50.0)])
    assert not found.recovered
    assert found.seconds == float("inf")
    assert np.isinf(found.finish_s).all()


A, B = (ShardSpec(name, (SIZE,), Box.full((SIZE,)), "int8") for name in "ab")


def fetch(senders: list[list[ShardSpec]], receivers: list[list[ShardSpec]], *deaths: Failure):
    layouts = Layout.from_ranks(senders), Layout.from_ranks(receivers)
    plan = plan_transfer(*layouts, hosts(len(senders), len(receivers), relays="never"))
    return simulate(plan, failures=deaths, detect_s=1.0)


def test_who_waits_for_the_dead_for_ever_keeps_nobody_else_from_recovering():
    """Sender 0 alone has "a", both have "b": it dies while both tensors are under way from it."""
    found = fetch([[A, B], [B]], [[A], [B], [B]], Failure(holder=0, at_s=10.0))
    assert np.isinf(found.finish_s).tolist() == [True, False, False]
    assert found.finish_s[1:].max() < 220  # At most 20,000 bytes over one link, and detection.


def test_who_waits_for_the_dead_for_ever_has_no_version_for_others():
    """Receiver 0 never gets "a": at 170 s it has "b", of which receiver 1 lacks a part."""
    c, d = (replace(A, name=name) for name in "cd")
    deaths = Failure(holder=0, at_s=10.0), Failure(holder=1, at_s=170.0)
    found = fetch([[A], [B], [c], [d]], [[A, B], [B, c, d]], *deaths)
    took = {(span.source, span.receiver): span.num_bytes for span in found.spans}
    assert took[1, 0] == SIZE
    assert 0 < took[1, 1] < SIZE
    assert np.isinf(found.finish_s).all()
    assert max(source for source, _ in took) < 4


def test_a_second_holder_sends_what_the_dead_one_owed():
    # 2 senders, 1 receiver, 50 bytes/s each. After 40 s one dies owing 3000 bytes; from 41 s on
    # the other sends them as well: 100 bytes/s for the remaining 2950 + 3000.
    links = replace(LINKS, rail=Link(100.0))
    rows = Layout.from_ranks(
        [[ShardSpec(f"t{i}", (1000,), Box.full((1000,)), "int8") for i in range(10)]] * 2
    )
    wanted = Layout.from_ranks([rows.specs_of(0)])
    plan = plan_transfer(rows, wanted, Topology.uniform(2, 1, gpus_per_host=1, links=links))
    found = simulate(plan, failures=[Failure(holder=1, at_s=40.0)], detect_s=1.0)
    # Alone on the receiver's card, the other is at 100 bytes/s from 40 s on: 3000 + 3000 in 60 s.
    assert found.recovered
    assert found.seconds == pytest.approx(100.0, abs=1.5)


def test_what_two_dead_relays_owed_is_sent_once():
    """One after the other feeds receiver 3: what it had of each of them is not sent again."""
    deaths = [Failure(holder=3, at_s=30.0), Failure(holder=2, at_s=60.0)]
    found = run(hosts(1, 4), failures=deaths, detect_s=1.0)
    took = {(span.source, span.receiver): span.num_bytes for span in found.spans}
    # A chunk behind each of its feeders when these die: 27 chunks, 28 more after 31 s, the rest.
    assert took[3, 3] == pytest.approx(2700, abs=100)
    assert took[2, 3] == pytest.approx(2800, abs=200)
    assert sum(size for (_, to), size in took.items() if to == 3) == pytest.approx(SIZE)


@pytest.mark.parametrize("seed", range(30))
def test_whoever_is_served_in_spite_of_deaths_took_what_it_wanted_and_no_more(seed):
    rng = np.random.default_rng(seed)
    num_senders, num_receivers = int(rng.integers(2, 7)), int(rng.integers(2, 25))
    topology = Topology.uniform(
        num_senders, num_receivers, gpus_per_host=int(rng.choice([1, 2, 4])), links=LINKS
    )
    relays, chunk_bytes = str(rng.choice(["auto", "never"])), int(rng.choice([50, 500, 5000]))
    topology = replace(topology, relays=relays, chunk_bytes=chunk_bytes)
    plan = plan_transfer(whole(num_senders), whole(num_receivers), topology)
    end_s = simulate(plan).seconds
    dead = rng.choice(plan.num_holders, size=min(3, plan.num_holders - 1), replace=False)
    failures = [Failure(holder=int(one), at_s=end_s * rng.random()) for one in dead]
    found = simulate(plan, failures=failures, detect_s=end_s / 10)
    took, wanted = np.zeros(num_receivers), plan.edge_bytes().sum(axis=0)
    for span in found.spans:
        took[span.receiver] += span.num_bytes
    served = [rank for rank in range(num_receivers) if found.lives(rank)]
    served = [rank for rank in served if np.isfinite(found.finish_s[rank])]
    assert took[served] == pytest.approx(wanted[served], rel=1e-6, abs=2)


def test_a_dead_receiver_that_feeds_nobody_costs_nothing():
    found = run(hosts(1, 3), failures=[Failure(holder=3, at_s=50.0)])
    assert found.recovered
    assert found.finish_s[:2] == pytest.approx([100.0, 101.0])


def test_a_death_after_the_end_leaves_the_links_as_busy_as_they_were():
    alone = run(hosts(1, 3))
    assert alone.busy[0][1] > 0.9
    late = run(hosts(1, 3), failures=[Failure(holder=3, at_s=1e6)])
    assert late.busy == alone.busy


@pytest.mark.parametrize("seed", range(8))
def test_bytes_are_conserved_and_no_plan_beats_the_bound(seed):
    rng = np.random.default_rng(seed)
    num_senders, num_receivers = int(rng.integers(1, 5)), int(rng.integers(1, 13))
    topology = Topology.uniform(
        num_senders, num_receivers, gpus_per_host=int(rng.choice([1, 2, 4])), links=LINKS
    )
    topology = replace(topology, chunk_bytes=int(rng.choice([50, 500, 5000])))
    plan = plan_transfer(whole(num_senders), whole(num_receivers), topology)
    found = simulate(plan)
    moved = np.zeros(num_receivers)
    for span in found.spans:
        moved[span.receiver] += span.num_bytes
    assert moved == pytest.approx(plan.edge_bytes().sum(axis=0))
    assert found.seconds >= plan.stats().busiest_s * 0.999 >= plan.lower_bound() * 0.998
    assert all(share <= 1 + 1e-9 for _, share in found.busy)


@pytest.mark.parametrize("num_receivers", [3, 10, 30])
@pytest.mark.parametrize("chunk_bytes", [100, 2000, SIZE])
def test_the_shape_that_was_chosen_is_the_fastest_one_simulated(num_receivers, chunk_bytes):
    chosen = run(hosts(2, num_receivers, chunk_bytes=chunk_bytes)).seconds
    direct = run(hosts(2, num_receivers, chunk_bytes=chunk_bytes, relays="never")).seconds
    assert chosen <= direct * 1.001


def test_two_thousand_receivers_in_a_few_steps():
    topology = replace(Topology.uniform(8, 2048, gpus_per_host=8), chunk_bytes=16 << 20)
    names = [f"t{i}" for i in range(64)]
    specs = [ShardSpec(name, (1 << 28,), Box.full((1 << 28,)), "int8") for name in names]
    plan = plan_transfer(
        Layout.from_ranks([specs] * 8), Layout.from_ranks([specs] * 2048), topology
    )
    found = simulate(plan)
    # 16 GiB into each of 256 hosts over 8 cards, 128 chunks each: the 256 hops of a chain would
    # take (128 + 255) / 128 of the bound, a binary tree about 2 (1 + 8 / 128) = 2.1 of it.
    assert found.recovered
    assert found.seconds == pytest.approx(2.1 * plan.lower_bound(), rel=0.05)


def test_the_picture_has_a_line_for_each_receiver():
    found = run(hosts(1, 3), failures=[Failure(holder=2, at_s=50.0)])
    lines = found.picture(width=40).splitlines()
    assert len(lines) == 4
    assert lines[2].endswith(" x")
    assert lines[1].count("#") > 30


def test_only_who_is_in_the_plan_can_die():
    with pytest.raises(TopologyError, match="no holder 9: the plan has 2"):
        run(hosts(1, 1), failures=[Failure(holder=9, at_s=1.0)])


def test_each_piece_costs_its_time_and_a_stream_has_its_limit():
    # 10,000 bytes in 10 pieces of 2 s each beside the 100 s of bytes.
    slow = replace(LINKS, rail=Link(100.0, piece_s=2.0))
    names = [ShardSpec(f"t{i}", (1000,), Box.full((1000,)), "int8") for i in range(10)]
    side = Layout.from_ranks([names])
    plan = plan_transfer(side, side, Topology.uniform(1, 1, links=slow))
    found = simulate(plan)
    assert found.seconds == pytest.approx(120.0)
    assert sum(span.num_bytes for span in found.spans) == pytest.approx(10_000)
    # One stream moves at most 40 of the link's 100 bytes a second, two share them 40 : 40.
    thin = replace(LINKS, rail=Link(100.0, stream_bytes_per_s=40.0))
    assert run(hosts(1, 1, links=thin)).seconds == pytest.approx(250.0)
    assert run(hosts(1, 2, links=thin, relays="never")).seconds == pytest.approx(250.0)
    assert run(hosts(1, 4, links=thin, relays="never")).seconds == pytest.approx(400.0)


def test_all_that_moves_inside_a_host_shares_what_the_host_can_do():
    # Three receivers on the sender's host, 100 bytes/s a device but 120 altogether: 30,000 / 120.
    links = replace(LINKS, host_total_bytes_per_s=120.0)
    topology = Topology.this_host(1, 3, links=links)
    plan = plan_transfer(whole(1), whole(3), replace(topology, chunk_bytes=100))
    assert plan.lower_bound() == pytest.approx(250.0)
    found = simulate(plan)
    # The sender's device alone would need 300 s.
    assert found.seconds >= 250.0
    assert plan.stats().busiest_s == pytest.approx(300.0)


def fair_by_hand(flows: list[tuple[int, int, float]], room: float = 1.0) -> list[float]:
    """Max-min fairness one port at a time: (port out, port in, limit) in, rates out."""
    rates, left = [-1.0] * len(flows), {port: room for flow in flows for port in flow[:2]}
    while -1.0 in rates:
        going = [i for i, rate in enumerate(rates) if rate < 0]
        level = min(
            [left[p] / sum(p in flows[i][:2] for i in going) for p in left if
             any(p in flows[i][:2] for i in going)] + [flows[i][2] for i in going]
        )  # fmt: skip
        full = [
            p
            for p in left
            if (n := sum(p in flows[i][:2] for i in going)) and left[p] / n <= level + 1e-12
        ]
        for i in going:
            if flows[i][2] <= level + 1e-12 or set(flows[i][:2]) & set(full):
                rates[i] = level
                for port in flows[i][:2]:
                    left[port] -= level
    return rates


@pytest.mark.parametrize("seed", range(20))
def test_rates_are_max_min_fair(seed):
    rng = np.random.default_rng(seed)
    count, num_ports = int(rng.integers(1, 40)), int(rng.integers(1, 9))
    out, into = rng.integers(0, num_ports, count), num_ports + rng.integers(0, num_ports, count)
    limits = np.where(rng.random(count) < 0.3, rng.random(count), np.inf)
    none = np.full(count, 2 * num_ports)
    zeros, ones = np.zeros(count, dtype=np.int64), np.ones(count)
    flows = Flows(
        nodes=np.arange(count),
        upstream=zeros - 1,
        sources=zeros,
        receivers=zeros,
        sizes=ones,
        overheads=0 * ones,
        ports=np.stack([out, into, none]),
        weights=np.stack([ones, ones, 0 * ones]),
        speeds=ones,
        limits=limits,
        latencies=0 * ones,
    )
    rates = FairRates(flows).at(ones > 0, zeros, ones < 0)
    expected = fair_by_hand(list(zip(out.tolist(), into.tolist(), limits.tolist(), strict=True)))
    assert rates.tolist() == pytest.approx(expected)


@pytest.mark.parametrize("seed", range(10))
def test_rates_from_moment_to_moment_are_those_worked_out_anew(seed):
    """Chains of relays over a few ports each: most of what was known stays as it was."""
    rng = np.random.default_rng(seed)
    count, per_chain = 60, 6
    chain, hop = np.divmod(np.arange(count), per_chain)
    out, into = 3 * chain + hop % 3, 30 + 3 * chain + rng.integers(0, 3, count)
    speeds = rng.choice([50.0, 100.0, 400.0], count)
    flows = Flows(
        nodes=np.arange(count),
        upstream=np.where(hop > 0, np.arange(count) - 1, -1),
        sources=chain,
        receivers=np.arange(count),
        sizes=np.ones(count),
        overheads=np.zeros(count),
        ports=np.stack([out, into, np.full(count, 60)]),
        weights=np.stack([np.ones(count), np.ones(count), np.zeros(count)]),
        speeds=speeds,
        limits=np.where(rng.random(count) < 0.2, 30.0, np.inf),
        latencies=np.zeros(count),
    )
    fed_by, moving = np.maximum(flows.upstream, 0), rng.random(count) < 0.5
    rates = FairRates(flows)
    for _ in range(30):
        moving = moving ^ (rng.random(count) < 0.03)
        tied = moving & (hop > 0) & (rng.random(count) < 0.8)
        found, anew = rates.at(moving, fed_by, tied), FairRates(flows).at(moving, fed_by, tied)
        assert found.tolist() == pytest.approx(anew.tolist(), rel=1e-12)
        assert not found[~moving].any()


@pytest.mark.parametrize("dies", [False, True])
def test_receivers_behind_the_last_that_wants_something_are_done_at_once(dies):
    """Such as ranks of a pipeline whose stage is not among the tensors, or of an uneven cut."""
    receivers = Layout.from_ranks([[*whole(1).specs_of(0)], [*whole(1).specs_of(0)], [], []])
    plan = plan_transfer(whole(1), receivers, hosts(1, 4, relays="never"))
    found = simulate(plan, failures=[Failure(holder=2, at_s=50.0)] if dies else [], detect_s=1.0)
    assert found.finish_s[2:].tolist() == [0.0, 0.0]
    assert found.recovered
    assert found.finish_s[0] == pytest.approx(126.0 if dies else 200.0, rel=0.05)


def test_what_pieces_cost_hides_no_recovery():
    """Half a second a piece: 50 bytes more. One piece of the dead goes with ten of the other."""
    link = Link(100.0, piece_s=0.5)
    topology = replace(
        hosts(2, 1, relays="never", chunk_bytes=SIZE),
        links=Links(device=link, host=link, rail=link, network=link),
    )
    both = ShardSpec("both", (1000,), Box((0,), (1000,)), "int8")
    boxes = [Box((low,), (low + 100,)) for low in range(0, 1000, 100)]
    ten = [ShardSpec("ten", (1000,), box, "int8") for box in boxes]
    senders, receivers = (
        Layout.from_ranks([[both], [both, *ten]]),
        Layout.from_ranks([[both, *ten]]),
    )
    plan = plan_transfer(senders, receivers, topology)
    assert simulate(plan).seconds == pytest.approx(25.5)
    found = simulate(plan, failures=[Failure(holder=0, at_s=0.0)], detect_s=0.0)
    assert found.recovered
    assert found.seconds == pytest.approx(25.5, rel=0.1)
