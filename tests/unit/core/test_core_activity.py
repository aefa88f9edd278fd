"""Where the time of a loop goes."""

import pytest

from cosmos_core.activity import ActivityMeter, shares_of


def test_seconds_add_up_over_visits():
    meter = ActivityMeter(("idle", "training", "waiting"), now=10.0)
    meter.enter("training", 11.0)
    meter.enter("idle", 14.0)
    meter.enter("training", 15.0)
    assert meter.seconds(20.0) == {"idle": 2.0, "training": 8.0, "waiting": 0.0}
    assert meter.shares(20.0) == {"idle": 0.2, "training": 0.8, "waiting": 0.0}
    assert meter.state == "training"


def test_before_any_time_has_passed_the_present_state_has_it_all():
    meter = ActivityMeter(("idle", "training"), now=3.0)
    assert meter.shares(3.0) == {"idle": 1.0, "training": 0.0}


def test_reading_the_meter_changes_nothing():
    meter = ActivityMeter(("idle", "training"), now=0.0)
    assert meter.seconds(1.0) == meter.seconds(1.0)


def test_shares_between_two_readings():
    early, late = {"idle": 4.0, "training": 1.0}, {"idle": 5.0, "training": 4.0}
    assert shares_of(late, since=early) == {"idle": 0.25, "training": 0.75}
    assert shares_of(late, since=late) == {"idle": 0.0, "training": 0.0}


def test_an_unknown_state_names_the_known_ones():
    with pytest.raises(ValueError, match="no state 'sleeping'; there are idle, training"):
        ActivityMeter(("idle", "training"), now=0.0).enter("sleeping", 1.0)


def test_time_does_not_run_backwards():
    meter = ActivityMeter(("idle",), now=5.0)
    with pytest.raises(ValueError, match=r"4\.0 comes before 5\.0"):
        meter.shares(4.0)


@pytest.mark.parametrize("states", [(), ("idle", "idle")])
def test_states_are_distinct_and_at_least_one(states: tuple[str, ...]):
    with pytest.raises(ValueError, match="distinct"):
        ActivityMeter(states, now=0.0)
