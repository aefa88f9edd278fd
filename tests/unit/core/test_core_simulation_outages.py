"""Simulated replicas and controllers that die and come back."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated import SIMPLE, TAILED, controlled

from cosmos_core.simulation import LogRecord, Outage, QueueDepths, Span, StepTaken, simulate

ONE_BY_ONE = controlled(0, 0)
SAVED = replace(ONE_BY_ONE, checkpoint_every=1)
"""The first version is there after 0.75 s, a group after one more, and a step takes two."""
FIRST_S = 3.75
ANYBODY = ("controller", "policy-0", "rollout-0", "rollout-1")


def ends(log: Sequence[LogRecord]) -> list[tuple[int, float]]:
    return [(r.step, round(r.end_s, 6)) for r in log if isinstance(r, StepTaken)]


def with_outage(name: str, at_s: float, away_s: float):
    return replace(SIMPLE, outages=(Outage(name=name, at_s=at_s, away_s=away_s),))


def test_a_rollout_that_dies_begins_its_group_anew_with_weights_it_fetches():
    log = simulate(ONE_BY_ONE, with_outage("rollout-0", 1.25, 1.0), steps=1)
    assert ends(log) == [(0, 2.25 + FIRST_S)]
    spans = [r for r in log if isinstance(r, Span) and r.role == "rollout"]
    assert not [r for r in spans if r.start_s < 2.25 and r.end_s > 1.25]
    assert sum(r.tokens for r in spans if r.end_s <= 1.25) == pytest.approx(5.0)


def test_what_a_rollout_had_been_told_to_load_when_it_died_is_not_loaded():
    log = simulate(ONE_BY_ONE, with_outage("rollout-0", 0.25, 0.125), steps=1)
    assert ends(log) == [(0, 0.375 + FIRST_S)]


def test_nothing_is_decided_while_nobody_controls():
    log = simulate(ONE_BY_ONE, with_outage("controller", 1.0, 3.0), steps=1)
    assert ends(log) == [(0, 4.0 + 2.0)]


def test_a_controller_that_is_away_while_all_are_busy_costs_nothing():
    log = simulate(ONE_BY_ONE, with_outage("controller", 2.0, 1.0), steps=1)
    assert ends(log) == [(0, FIRST_S)]


def test_a_policy_that_dies_takes_the_step_in_hand_anew():
    log = simulate(ONE_BY_ONE, with_outage("policy-0", 2.75, 1.0), steps=1)
    assert ends(log) == [(0, 3.75 + 2.0)]
    trained = [r for r in log if isinstance(r, Span) and r.activity == "fwd_bwd"]
    assert [(r.start_s, r.end_s) for r in trained] == [(1.75, 2.75), (3.75, 5.75)]


@pytest.mark.parametrize(("control", "steps"), [(SAVED, [0, 1, 2]), (ONE_BY_ONE, [0, 1, 0, 1, 2])])
def test_a_policy_goes_on_from_its_last_checkpoint(control, steps):
    undisturbed = ends(simulate(control, SIMPLE, steps=3))
    died_s = undisturbed[1][1] + 0.5
    log = simulate(control, with_outage("policy-0", died_s, 0.25), steps=3)
    assert [step for step, _ in ends(log)] == steps


def test_a_death_is_paid_for_once():
    control = controlled(2, 4, groups=8, samples=4)
    outage = Outage(name="rollout-1", at_s=5.0, away_s=1.0)
    alone, disturbed = (
        ends(simulate(control, replace(TAILED, train_s=0.6, outages=outages), steps=30))[-1][1]
        for outages in ((), (outage,))
    )
    assert 0.2 < disturbed - alone < 3.0


@settings(deadline=None, max_examples=30)
@given(data=st.data())
def test_every_step_is_taken_whoever_dies_and_none_on_samples_too_old(data: st.DataObject) -> None:
    times = data.draw(st.lists(st.integers(0, 400), max_size=12, unique=True))
    outages = tuple(
        Outage(
            name=data.draw(st.sampled_from(ANYBODY)),
            at_s=time / 20,
            away_s=data.draw(st.integers(0, 4)) / 100,
        )
        for time in times
    )
    control = replace(controlled(2, 3, groups=4, samples=2), checkpoint_every=2)
    system = replace(TAILED, message_s=0.004, train_s=0.4, outages=outages)
    log = simulate(control, system, steps=12)
    last = {r.step: r for r in log if isinstance(r, StepTaken)}
    assert sorted(last)[:12] == list(range(12))
    for step in last.values():
        assert len(step.samples) == 4 * 2
        assert all(step.step - sample.oldest_version <= 3 for sample in step.samples)
    assert [r for r in log if isinstance(r, QueueDepths)][-1].consumed == 12 * 4
    assert simulate(control, system, steps=12) == log


@pytest.mark.parametrize(
    ("outages", "message"),
    [
        (((("rollout-1"), 1.0, 1.0),), r"outages has 'rollout-1', who is not there: controller"),
        ((("rollout-0", 3.0, 1.0), ("rollout-0", 1.0, 2.5)), r"is away until 3\.5 s"),
        ((("policy-0", -1.0, 1.0),), r"want 0 or more"),
        ((("policy-0", 1.0, -1.0),), r"want 0 or more"),
    ],
)
def test_outages_that_cannot_be_are_refused(outages, message):
    with pytest.raises(ValueError, match=message):
        replace(
            SIMPLE,
            outages=tuple(Outage(name=name, at_s=at, away_s=away) for name, at, away in outages),
        )
