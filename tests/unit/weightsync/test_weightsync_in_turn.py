"""Receivers do not all begin with the same sender."""

import random

import pytest

from cosmos_weightsync import Layout, ReceiverConfig
from cosmos_weightsync.receiver_config import usual_threads
from cosmos_weightsync.staging import Edge, Source
from cosmos_weightsync.turns import in_turn

NOTHING = Layout.from_ranks([[]])


def edges(num_senders: int, num_relays: int = 0) -> list[Edge]:
    senders = [Source(f"s{n}", f"sender {n}", NOTHING, "sender", n) for n in range(num_senders)]
    relays = [Source(f"r{n}", f"receiver {n}", NOTHING, "receiver", n) for n in range(num_relays)]
    return [Edge(source, NOTHING, is_relay=source in relays) for source in (*relays, *senders)]


@pytest.mark.parametrize("turn", [0.0, 0.24, 0.25, 0.6, 0.999])
def test_each_begins_somewhere_and_takes_all_in_a_round(turn):
    given = edges(4)
    found = in_turn(given, turn)
    first = int(4 * turn)
    assert [given.index(edge) for edge in found] == [(first + n) % 4 for n in range(4)]


def test_relays_come_last_and_as_planned():
    given = edges(3, num_relays=2)
    assert in_turn(given, 0.5)[-2:] == given[:2]
    assert set(in_turn(given, 0.5)) == set(given)
    assert in_turn(edges(0, 2), 0.9)
    assert in_turn([], 0.9) == []


def test_sixty_four_senders_are_busy_where_sixteen_receivers_begin_with_four_each():
    chance, given = random.Random(0), edges(64)
    turns = [in_turn(given, chance.random())[:4] for _ in range(16)]
    loads = [sum(edge in begun for begun in turns) for edge in given]
    assert sum(load > 0 for load in loads) > 32  # By rank it would be four of them.
    assert max(loads) <= 6


def test_few_processors_read_from_few_senders_at_a_time():
    assert 2 <= usual_threads() <= 4
    assert ReceiverConfig().num_threads == usual_threads()
    assert ReceiverConfig(num_threads=7).num_threads == 7
