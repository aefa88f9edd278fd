"""Chain, tree or direct: the choice is the best of all forests, simulated one by one."""

from dataclasses import replace

import pytest

from cosmos_weightsync import Box, Layout, Link, Links, ShardSpec, Topology, plan_transfer, simulate
from cosmos_weightsync.routing import Shape
from cosmos_weightsync.shaping import Candidate, Demand, choose_shapes, simulated_s

LINK = Link(100.0)


def demand(send: int, receive: int, **link: float) -> Demand:
    return Demand(send_bytes=send, receive_bytes=receive, link=replace(LINK, **link))


@pytest.mark.parametrize(
    ("num_hosts", "shape", "chunk", "seconds"),
    [
        (1, Shape(1, 1), 1000, 100.0),  # 10,000 bytes at 100 bytes/s.
        (4, Shape(4, 1), 1000, 400.0),  # A star: everything leaves the sender four times.
        (4, Shape(1, 1), 1000, 130.0),  # A chain: three hops of a chunk of 10 s.
        (4, Shape(2, 1), 1000, 210.0),  # Two chains of two, both at half speed; a chunk is 10 s.
        (3, Shape(1, 2), 1000, 210.0),  # 10 s until the root has a chunk, then it sends it twice.
    ],
)
def test_a_forest_takes_as_long_as_by_hand(num_hosts, shape, chunk, seconds):
    found = simulated_s(num_hosts, demand(10_000, 10_000), Candidate(shape, chunk))
    assert found == pytest.approx(seconds, rel=0.01)


@pytest.mark.parametrize("num_hosts", [2, 5, 12])
@pytest.mark.parametrize("send", [1000, 10_000])
@pytest.mark.parametrize("chunk", [100, 2500, 10_000])
def test_no_other_forest_is_faster(num_hosts, send, chunk):
    wanted = demand(send, 10_000, latency_s=1.0)
    shapes, _ = choose_shapes([num_hosts], wanted, chunk)
    chosen = simulated_s(num_hosts, wanted, Candidate(shapes[num_hosts], chunk))
    every = [
        simulated_s(num_hosts, wanted, Candidate(Shape(feeds, arity), chunk))
        for feeds in range(1, num_hosts + 1)
        for arity in range(1, 5)
    ]
    assert chosen <= min(every) * 1.02


def test_chunks_are_small_unless_pieces_cost_much():
    # 64 MiB over a chain of 16 hosts: the last is 15 chunks late.
    cheap = demand(64 << 20, 64 << 20, bytes_per_s=float(1 << 30))
    assert choose_shapes([16], cheap, None)[1] == 1 << 20
    # At 50 ms a piece, 64 pieces cost 3.2 s of a transfer of 62 ms.
    dear = replace(cheap, link=replace(cheap.link, piece_s=0.05))
    assert choose_shapes([16], dear, None)[1] == 16 << 20
    assert choose_shapes([16], dear, 12345)[1] == 12345


def test_a_host_or_none_needs_no_forest():
    assert choose_shapes([0, 1], demand(10, 10), 5)[0] == {0: Shape(1, 1), 1: Shape(1, 1)}


@pytest.mark.parametrize("num_receivers", [2, 6, 17])
def test_the_plan_takes_as_long_as_its_forest(num_receivers):
    box = Box.full((100_000,))
    side = [[ShardSpec("w", (100_000,), box, "int8")]]
    links = Links(rail=LINK, network=LINK)
    topology = Topology.uniform(1, num_receivers, gpus_per_host=1, links=links)
    topology = replace(topology, chunk_bytes=5000)
    plan = plan_transfer(Layout.from_ranks(side), Layout.from_ranks(side * num_receivers), topology)
    shapes, _ = choose_shapes([num_receivers], demand(100_000, 100_000), 5000)
    forest = Candidate(shapes[num_receivers], 5000)
    expected = simulated_s(num_receivers, demand(100_000, 100_000), forest)
    assert simulate(plan).seconds == pytest.approx(expected, rel=1e-3)
