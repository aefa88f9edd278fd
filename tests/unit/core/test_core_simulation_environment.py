"""Simulated samples of two turns, between which an environment takes its time."""

import hashlib
import heapq
import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from simulated import SIMPLE, TAILED, controlled

from cosmos_core.messages import CancelGroup, Event, Generate, GroupFinished, GroupId
from cosmos_core.simulation import (
    Capacity,
    LengthConfig,
    LogRecord,
    QueueDepths,
    Span,
    StepTaken,
    figures_of,
    generate_bound_s,
    read_log,
    simulate,
    write_log,
)
from cosmos_core.simulation.engine import SimulatedRollout

ONE_BY_ONE = replace(SIMPLE, environment_s=2.0)
BEGIN_S = 0.75
"""The first version is there."""
AWAY = replace(TAILED, train_s=0.5, environment_s=0.5)
WITHOUT = "25ba31b6"
"""How the digest of steps and queues began before there were environments; admission changes it."""


def first_step(log: Sequence[LogRecord]) -> StepTaken:
    return next(record for record in log if isinstance(record, StepTaken))


def rollout_spans(log: Sequence[LogRecord]) -> list[Span]:
    return [r for r in log if isinstance(r, Span) and r.role == "rollout"]


class Alone:
    """A clock, and nobody around a replica; see `World`."""

    def __init__(self) -> None:
        self.now = 0.0
        self.events: list[Event] = []
        self.log: list[LogRecord] = []
        self._pending: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()

    def after(self, seconds: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._pending, (self.now + seconds, next(self._order), call))

    def send(self, event: Event) -> None:
        self.events.append(event)

    def record(self, record: LogRecord) -> None:
        self.log.append(record)

    def run(self) -> None:
        while self._pending:
            self.now, _, call = heapq.heappop(self._pending)
            call()


def test_without_an_environment_steps_and_queues_are_what_they_were_to_the_last_bit() -> None:
    log = simulate(
        controlled(2, 4, groups=4, samples=2), replace(AWAY, environment_s=0.0), steps=12
    )
    lines = b"\n".join(msgspec.json.encode(r) for r in log if not isinstance(r, Span))
    assert hashlib.sha256(lines).hexdigest()[:8] == WITHOUT


def test_a_group_takes_its_tokens_and_the_answer_of_its_environment() -> None:
    log = simulate(controlled(0, 0), ONE_BY_ONE, steps=1)
    first, second = ONE_BY_ONE.turns(0, 0)
    answer_s = ONE_BY_ONE.answer_s(0, first)
    assert first_step(log).start_s == pytest.approx(BEGIN_S + 1.0 + answer_s)
    played = [span for span in rollout_spans(log) if span.activity in {"decode", "env_wait"}]
    assert [(span.activity, span.end_s - span.start_s, span.tokens) for span in played] == [
        ("decode", pytest.approx(0.1 * first), pytest.approx(first)),
        ("env_wait", pytest.approx(answer_s), 0.0),
        ("decode", pytest.approx(0.1 * second), pytest.approx(second)),
    ]
    assert first_step(log).samples[0].num_tokens == 10


def test_others_are_decoded_in_the_place_of_a_sample_that_is_with_its_environment() -> None:
    """One place and two samples: the second turns come in the order in which the answers do."""
    system = replace(ONE_BY_ONE, environment_s=20.0)
    log = simulate(controlled(0, 0, samples=2), system, steps=1)
    turns = [system.turns(0, sibling) for sibling in range(2)]
    free_s, back = BEGIN_S, list[tuple[float, int]]()
    for first, second in turns:
        free_s += 0.1 * first
        back.append((free_s + system.answer_s(0, first), second))
    waited_s = 0.0
    for back_s, second in sorted(back):
        waited_s += max(0.0, back_s - free_s)
        free_s = max(back_s, free_s) + 0.1 * second
    assert first_step(log).start_s == pytest.approx(free_s)
    told = [s.end_s - s.start_s for s in rollout_spans(log) if s.activity == "env_wait"]
    assert sum(told) == pytest.approx(waited_s)
    assert waited_s > 0


def test_a_sample_that_is_away_during_a_swap_has_tokens_of_two_versions() -> None:
    log = simulate(controlled(2, 4, groups=4, samples=2), AWAY, steps=8)
    samples = [sample for r in log if isinstance(r, StepTaken) for sample in r.samples]
    assert any(sample.oldest_version < sample.newest_version for sample in samples)
    for step in (record for record in log if isinstance(record, StepTaken)):
        assert all(step.step - sample.oldest_version <= 4 for sample in step.samples)


def test_every_generated_token_is_decoded_once_in_one_of_two_turns() -> None:
    log = simulate(controlled(2, 4, groups=8, samples=4), AWAY, steps=10)
    last = [record for record in log if isinstance(record, QueueDepths)][-1]
    in_work = sum(span.tokens for span in rollout_spans(log)) - last.generated_tokens
    assert 0 <= in_work <= 2 * 8 * 4 * 256


def test_a_group_that_is_given_up_does_not_come_back_from_its_environment() -> None:
    """Of two groups the first one is given up half-way through its answer."""
    world = Alone()
    rollout = SimulatedRollout("r", ONE_BY_ONE, world)
    groups = [GroupId("train", 0, ordinal) for ordinal in range(2)]
    for group in groups:
        rollout.obey(Generate(group=group, attempt=0, num_samples=1))
    first, _ = ONE_BY_ONE.turns(0, 0)
    given_up_s = 0.1 * first + 0.5 * ONE_BY_ONE.answer_s(0, first)
    world.after(given_up_s, lambda: rollout.obey(CancelGroup(group=groups[0], attempt=0)))
    world.run()
    rollout.end()
    finished = [event.group for event in world.events if isinstance(event, GroupFinished)]
    assert finished == groups[1:]
    decoded = sum(span.tokens for span in rollout_spans(world.log))
    assert decoded == pytest.approx(first + 10)


def test_two_turns_have_the_length_of_one_and_cost_no_more_tokens() -> None:
    plain = replace(AWAY, environment_s=0.0)
    for ordinal in range(100):
        first, second = AWAY.turns(ordinal, 1)
        assert plain.turns(ordinal, 1) == (first + second,)
        assert min(first, second) >= 1
    config = controlled(2, 4, groups=8, samples=4)
    assert generate_bound_s(config, AWAY) == generate_bound_s(config, plain)
    single = LengthConfig(median=1.0, sigma=0.0)
    assert replace(AWAY, lengths=single).turns(0, 0) == (1, 1)


def test_answers_are_exponential_and_drawn_from_prompt_and_turn() -> None:
    answers = [AWAY.answer_s(ordinal, 7) for ordinal in range(4000)]
    assert sum(answers) / len(answers) == pytest.approx(0.5, rel=0.05)
    assert sum(answer > 1.0 for answer in answers) / len(answers) == pytest.approx(0.135, abs=0.02)
    assert answers[3] == AWAY.answer_s(3, 7) != AWAY.answer_s(3, 8)
    assert replace(AWAY, environment_s=0.0).answer_s(3, 7) == 0.0


def test_figures_tell_how_long_engines_waited_for_environments() -> None:
    """Of 2 s that count, one of two engines waits for 0.5 s."""
    log = [
        *(StepTaken(step=k, start_s=0.0, end_s=1.0 + 2 * k, samples=()) for k in range(2)),
        Span(role="rollout", replica="a", activity="env_wait", start_s=0.0, end_s=1.5),
        Span(role="rollout", replica="b", activity="reward_wait", start_s=1.0, end_s=3.0),
    ]
    found = figures_of(log, Capacity(rollouts=2, tokens_per_s=1.0, max_running=1), skip=1)
    assert found.environment_wait == pytest.approx(0.5 / 4.0)


def test_a_wait_for_an_environment_is_read_back_and_one_for_something_else_refused(
    tmp_path: Path,
) -> None:
    log = simulate(controlled(0, 0), ONE_BY_ONE, steps=1)
    write_log(tmp_path / "log.jsonl", log)
    assert read_log([tmp_path / "log.jsonl"]) == log
    text = (tmp_path / "log.jsonl").read_text()
    assert '"activity":"env_wait"' in text
    (tmp_path / "bad.jsonl").write_text(text.replace("env_wait", "nap"))
    with pytest.raises(msgspec.ValidationError, match="nap"):
        read_log([tmp_path / "bad.jsonl"])
