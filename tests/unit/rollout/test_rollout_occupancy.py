"""Occupancy: seconds by state, slot time and token capacity, worked out by hand."""

import pytest

from cosmos_rollout import OccupancyReading
from cosmos_rollout.occupancy import Occupancy


def test_a_replica_that_worked_waited_and_stalled():
    occupancy = Occupancy(4, now=10.0)
    occupancy.account(groups=2, requests=8, now=11.0)  # 1 s idle before
    occupancy.read(100, now=12.0)  # 100 tokens in 2 s
    occupancy.account(groups=2, requests=4, now=13.0)
    occupancy.read(400, now=13.0)  # 300 tokens in 1 s: the peak
    occupancy.stalled(0.5, now=13.75)
    occupancy.account(groups=1, requests=0, episodes=2, now=14.0)
    occupancy.account(groups=1, requests=0, now=14.75)
    occupancy.account(groups=0, requests=0, now=16.0)
    reading = occupancy.read(500, now=20.0)
    assert reading == OccupancyReading(
        elapsed_s=10.0,
        seconds={
            "idle_no_work": 5.0,
            "gated_staleness": 0.0,
            "decoding": 2.5,
            "waiting_for_environment": 0.75,
            "waiting_for_rewards": 1.25,
            "paused_for_weights": 0.5,
        },
        slot_seconds=2 * 3.0 + 1 * 2.0,
        request_seconds=8 * 2.0 + 4 * 1.0,
        num_tokens=500,
        peak_tokens_per_s=300.0,
        slots=4,
    )
    assert reading.slot_share == pytest.approx(8.0 / 40.0)
    assert reading.token_share == pytest.approx(500 / 3000)


def test_before_any_time_has_passed_nothing_is_divided():
    reading = Occupancy(1, now=0.0).read(0, now=0.0)
    assert (reading.slot_share, reading.token_share) == (0.0, 0.0)


def test_a_swap_takes_only_from_decoding_that_no_reading_has_told():
    occupancy = Occupancy(1, now=0.0)
    occupancy.account(groups=1, requests=1, now=0.0)
    told = occupancy.read(0, now=1.0)
    occupancy.stalled(0.5, now=1.2)  # 0.3 s of it lie before the reading
    occupancy.account(groups=1, requests=0, now=2.0)
    occupancy.stalled(0.5, now=3.0)  # while a reward was computed
    occupancy.account(groups=1, requests=1, now=3.0)
    occupancy.stalled(0.5, now=3.1)  # began before the decoding
    found = occupancy.read(0, now=4.0).seconds
    rise = {state: found[state] - told.seconds[state] for state in found}
    assert rise == pytest.approx(
        {
            "idle_no_work": 0.0,
            "gated_staleness": 0.0,
            "decoding": 0.8 + 0.9,
            "waiting_for_environment": 0.0,
            "waiting_for_rewards": 1.0,
            "paused_for_weights": 0.2 + 0.1,
        }
    )


def test_a_group_tells_for_how_long_it_was_withheld_from_an_empty_replica():
    """Of 6 s without a group, 2 s were told as such before it says that 5 s were admission's."""
    occupancy = Occupancy(1, now=0.0)
    told = occupancy.read(0, now=2.0)
    assert told.seconds["idle_no_work"] == 2.0
    occupancy.given(5.0, now=6.0)
    occupancy.account(groups=1, requests=1, now=6.0)
    found = occupancy.read(0, now=8.0)
    assert found.seconds["gated_staleness"] == pytest.approx(4.0)
    assert found.seconds["idle_no_work"] == pytest.approx(2.0)
    assert found.withheld_before_s == pytest.approx(1.0)
    assert sum(found.seconds.values()) == pytest.approx(8.0)
