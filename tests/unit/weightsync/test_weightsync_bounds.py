"""The time that no plan can beat: each term of it, worked out by hand.

Everywhere a card moves 10 bytes a second and a copy on one device takes no time to speak of.
"""

from collections.abc import Sequence

import pytest

from cosmos_weightsync import Box, Layout, ShardSpec, Topology, plan_transfer, simulate
from cosmos_weightsync.plans import TransferPlan
from cosmos_weightsync.topology import Link, Links, Place

SIZE = 720
ALL = (0, SIZE)
Rows = tuple[int, int]
Ranks = Sequence[tuple[Rows, Place]]
"""What each rank of a side has or wants of one tensor of `SIZE` bytes, and where it sits."""


def side(ranks: Ranks) -> Layout:
    specs = [ShardSpec("w", (SIZE,), Box((rows[0],), (rows[1],)), "int8") for rows, _ in ranks]
    return Layout.from_ranks([[spec] for spec in specs])


def plan(senders: Ranks, receivers: Ranks, host: float, total: float | None = None) -> TransferPlan:
    card = Link(10.0)
    links = Links(
        device=Link(1e9),
        host=Link(host),
        rail=card,
        network=card,
        host_total_bytes_per_s=total,
    )
    topology = Topology(
        senders=tuple(place for _, place in senders),
        receivers=tuple(place for _, place in receivers),
        links=links,
        chunk_bytes=8,
    )
    return plan_transfer(side(senders), side(receivers), topology)


def cut(parts: int, host: str) -> Ranks:
    """Equal parts of the tensor, each on a host of its own."""
    size = SIZE // parts
    return [((i * size, (i + 1) * size), Place(f"{host}{i}")) for i in range(parts)]


def whole(count: int, host: str) -> Ranks:
    """Everything, on so many hosts."""
    return [(ALL, Place(f"{host}{i}")) for i in range(count)]


def gpus(count: int, rows: Rows = ALL) -> Ranks:
    """Ranks of one host, each with a device and a card."""
    return [(rows, Place("r", i, i)) for i in range(count)]


ON_ONE_DEVICE = [(ALL, Place("r", 0, 0)), (ALL, Place("r", 0, 1))]
HERE: Ranks = [(ALL, Place("r", 8, 8))]
"""A sender on the host of `gpus`."""


@pytest.mark.parametrize(
    ("senders", "receivers", "host", "with_relays", "without"),
    [
        pytest.param(
            # The sender's card: 720 / 10. Without relays it sends all to each of three.
            *(whole(1, "s"), whole(3, "r"), 100.0, 72.0, 3 * 720 / 10),
            id="each-byte-leaves-its-holders-once",
        ),
        pytest.param(
            # Of four senders each has 180 bytes: 18 s. Each of two receivers takes 360: 36 s.
            *(cut(4, "s"), cut(2, "r"), 100.0, 36.0, 36.0),
            id="senders-share",
        ),
        pytest.param(
            # Sender 0 alone has 600 bytes, whatever sender 1 does: 60 s, and 36 s into each host.
            *([((0, 600), Place("a")), ((600, 720), Place("b"))], cut(2, "r"), 100.0, 60.0, 60.0),
            id="by-who-holds-it",
        ),
        pytest.param(
            # 720 bytes over both cards of the host: 36 s. Without relays each card takes 720.
            *(cut(6, "s"), gpus(2), 100.0, 36.0, 72.0),
            id="each-byte-enters-a-host-once",
        ),
        pytest.param(
            # The links inside are slow: 720 / (10 of the card + 2 of the link) = 60 s, not 18 s
            # for four cards.
            *(cut(6, "s"), gpus(4), 2.0, 60.0, 72.0),
            id="whichever-way-they-come",
        ),
        pytest.param(
            # Two ranks of one device have two cards and two links for it: 720 / 24 = 30 s, less
            # than the 36 s of their host's two cards.
            *(cut(6, "s"), ON_ONE_DEVICE, 2.0, 36.0, 72.0),
            id="a-device-lacks-a-byte-once",
        ),
        pytest.param(
            # Who has it is on the same host, over a link slower than a card: 720 / 2.
            *(HERE, gpus(2), 2.0, 360.0, 360.0),
            id="only-its-own-host-has-it",
        ),
        pytest.param(
            # The same, but a receiver elsewhere wants it too: 72 s for the sender's card, and what
            # is there comes back by cards meanwhile; 720 / 12 = 60 s. Not so without relays.
            *(HERE, [*gpus(1), *whole(1, "x")], 2.0, 72.0, 360.0),
            id="somebody-elsewhere-has-it-soon",
        ),
        pytest.param(
            # With fast links the card of a host's only receiver: 720 / 10.
            *(cut(6, "s"), gpus(1), 1000.0, 72.0, 72.0),
            id="one-receiver",
        ),
    ],
)
def test_the_bound_is_that_of_its_busiest_term(senders, receivers, host, with_relays, without):
    found = plan(senders, receivers, host)
    assert found.lower_bound() == found.lower_bound(relays="auto") == pytest.approx(with_relays)
    assert found.lower_bound(relays="never") == pytest.approx(without)
    assert simulate(found).seconds >= 0.999 * with_relays


def test_all_that_moves_in_a_host_is_bounded_by_what_the_host_can_do():
    # Three devices take 720 bytes each, 30 a second altogether: 72 s, and 7.2 s for each link.
    three = plan(HERE, gpus(3), 100.0, total=30.0)
    assert [three.lower_bound(relays=r) for r in ("auto", "never")] == pytest.approx([72.0, 72.0])
    # Two ranks of one device need it once, if one may hand it on: 720 / 30.
    two = plan(HERE, ON_ONE_DEVICE, 100.0, total=30.0)
    assert [two.lower_bound(relays=r) for r in ("auto", "never")] == pytest.approx([24.0, 48.0])


def test_who_wants_what_its_own_device_has_waits_for_nothing():
    here = plan([(ALL, Place("r", 0, 0))], [(ALL, Place("r", 0, 1))], 2.0)
    assert here.lower_bound() == here.lower_bound(relays="never") == 0.0
