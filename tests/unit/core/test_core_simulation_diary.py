"""Why an engine is empty, and what a policy that trains nothing does, in one log for all runs."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import get_args

import pytest
from simulated import SIMPLE, TAILED, controlled

from cosmos_core.control import Controller, ValidationPlan
from cosmos_core.messages import (
    Generate,
    GroupFinished,
    GroupId,
    ReplicaJoined,
    SampleRef,
    StepFinished,
    Train,
)
from cosmos_core.simulation import (
    Activity,
    Capacity,
    Diary,
    LogRecord,
    Span,
    StepTaken,
    figures_of,
    simulate,
)

Told = list[tuple[Activity, float, float]]


def diary() -> tuple[Diary, list[LogRecord]]:
    log: list[LogRecord] = []
    return Diary("rollout", "r", log.extend, start_s=0.0), log


def told(log: Sequence[LogRecord]) -> Told:
    return [(r.activity, r.start_s, r.end_s) for r in log if isinstance(r, Span)]


def seconds_of(log: Sequence[LogRecord], role: str) -> dict[str, float]:
    seconds: dict[str, float] = defaultdict(float)
    for record in log:
        if isinstance(record, Span) and record.role == role:
            seconds[record.activity] += record.end_s - record.start_s
    return seconds


def test_what_an_empty_engine_waited_for_is_told_by_the_group_that_comes() -> None:
    book, log = diary()
    book.note("decode", 2.0, version=0, width=1, tokens=4.0)
    book.note("idle_no_work", 4.0, version=0)
    book.note("swap", 4.5, version=1)
    book.note("idle_no_work", 6.0, version=1)
    assert told(log) == [("decode", 0.0, 2.0)]  # the others may be of another kind
    book.given(3.0, 6.0)
    book.note("decode", 7.0, version=1, width=1, tokens=2.0)
    book.close()
    assert told(log) == [
        ("decode", 0.0, 2.0),
        ("idle_no_work", 2.0, 3.0),
        ("gated_staleness", 3.0, 4.0),
        ("swap", 4.0, 4.5),
        ("gated_staleness", 4.5, 6.0),
        ("decode", 6.0, 7.0),
    ]


def test_a_wait_may_be_noted_after_the_group_has_come() -> None:
    """An engine notices it with its next step: until 5 it was withheld, then the group came."""
    book, log = diary()
    book.given(4.0, 5.0)
    book.given(0.0, 5.0)  # of several that come at once, the first one says so
    book.note("idle_no_work", 5.5, version=0)
    book.note("decode", 6.0, version=0, width=1, tokens=1.0)
    book.close()
    assert told(log) == [
        ("idle_no_work", 0.0, 1.0),
        ("gated_staleness", 1.0, 5.0),
        ("idle_no_work", 5.0, 5.5),
        ("decode", 5.5, 6.0),
    ]


def test_the_same_thing_once_more_makes_one_span() -> None:
    book, log = diary()
    for end_s in (1.0, 2.0, 3.0):
        book.note("decode", end_s, version=0, width=2, tokens=2.0)
    book.note("decode", 4.0, version=0, width=1, tokens=1.0)
    book.note("swap", 4.0, version=1)  # no time has passed
    book.close()
    assert told(log) == [("decode", 0.0, 3.0), ("decode", 3.0, 4.0)]
    assert [record.tokens for record in log if isinstance(record, Span)] == [6.0, 1.0]


def test_what_has_no_group_after_it_is_no_work() -> None:
    """At the end of a run none comes any more."""
    book, log = diary()
    book.note("idle_no_work", 1.0, version=0)
    book.close()
    assert told(log) == [("idle_no_work", 0.0, 1.0)]


def test_a_simulated_synchronous_engine_waits_for_messages_and_else_for_admission() -> None:
    """A step takes 3.75 s and six messages of 0.01 s; 1 s is decoded, 0.25 s swapped.

    Two messages are of a group that has been sampled or is to be; the other four pass while
    admission has nothing to give out. The eight steps that count may cut through one message.
    """
    log = simulate(controlled(0, 0), replace(SIMPLE, message_s=0.01), steps=12)
    found = figures_of(log, Capacity(rollouts=1, tokens_per_s=10.0, max_running=1), skip=4)
    assert found.step_s == pytest.approx(3.81)
    message = 0.0101 / (8 * 3.81)
    assert found.no_work == pytest.approx(2 * 0.01 / 3.81, abs=message)
    assert found.withheld == pytest.approx((3.81 - 1.0 - 0.25 - 0.02) / 3.81, abs=message)


def test_simulated_engines_wait_for_nothing_but_admission_once_messages_take_no_time() -> None:
    log = simulate(controlled(1, 1, groups=8, samples=4), TAILED, steps=12)
    first = min(record.end_s for record in log if isinstance(record, StepTaken))
    waited = [r for r in log if isinstance(r, Span) and r.activity == "idle_no_work"]
    assert all(span.start_s < first for span in waited)
    assert seconds_of(log, "rollout")["gated_staleness"] > 0


def test_a_simulated_policy_waits_for_the_validation_before_its_first_step() -> None:
    """Two prompts of 1 s each, once the engine has weights; then comes the sample of the step."""
    plan = ValidationPlan(num_prompts=2, before=True, every=0)
    log = simulate(replace(controlled(2, 4), validation=plan), SIMPLE, steps=3)
    waits = [r for r in log if isinstance(r, Span) and r.activity in {"eval", "wait_data"}]
    assert waits[0].activity == "eval"
    assert waits[0].end_s - waits[0].start_s == pytest.approx(2.0)
    assert [span.activity for span in waits].count("eval") == 1


def test_the_samples_of_a_step_are_fetched_before_it_is_taken() -> None:
    """Each step of a synchronous run has to wait for them."""
    log = simulate(controlled(0, 0), replace(SIMPLE, fetch_s=0.5), steps=12)
    found = figures_of(log, Capacity(rollouts=1, tokens_per_s=10.0, max_running=1), skip=4)
    assert found.step_s == pytest.approx(4.25)
    assert found.policy_idle == pytest.approx(2.25 / 4.25)


def test_the_first_group_after_a_wait_says_for_how_long_it_was_withheld() -> None:
    controller = Controller(controlled(0, 0))
    policy = ReplicaJoined(replica="p", role="policy", endpoints=("here",))
    controller.handle(policy, 0.0)
    joined = ReplicaJoined(replica="r", role="rollout", slots=1, version=0)
    ((_, first),) = controller.handle(joined, 1.0)
    assert isinstance(first, Generate)
    assert first.withheld_s == 0.0
    ref = SampleRef(sibling=0, status="completed", key="k", num_tokens=1)
    group = GroupId("train", 0, 0)
    done = GroupFinished(replica="r", group=group, attempt=0, samples=(ref,))
    ((_, train),) = controller.handle(done, 5.0)
    assert isinstance(train, Train)
    assert train.validated_s == 0.0
    controller.handle(StepFinished(replica="p", step=0), 8.0)
    rejoined = ReplicaJoined(replica="r", role="rollout", slots=1, version=1)
    ((_, again),) = controller.handle(rejoined, 9.0)
    assert isinstance(again, Generate)
    assert again.withheld_s == 0.0  # another process, which was not there


def test_simulations_write_every_activity_but_those_of_the_other_kinds_of_run() -> None:
    """Checkpoints take no time in virtual time, and an optimizer is a part of its step."""
    plan = ValidationPlan(num_prompts=2, before=True, every=0)
    validated = replace(controlled(1, 1, groups=4, samples=2), validation=plan)
    system = replace(TAILED, train_s=0.5, push_s=0.1, swap_s=0.01, snapshot_s=0.01)
    system = replace(system, message_s=0.01, score_s=0.3, environment_s=0.5, push="blocking")
    found = {r.activity for r in simulate(validated, system, steps=12) if isinstance(r, Span)}
    assert set(get_args(Activity)) - found == {"optim", "checkpoint"}
