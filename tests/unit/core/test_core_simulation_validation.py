"""How far training gets while a validation is answered, in virtual time.

A step takes 1 s to train and 1 s to generate. Of each held-out prompt two answers are asked, the
second of which takes 10 s: so long a round of few prompts is open, and who answers it keeps its
version. Each rollout has four places.
"""

import itertools
from dataclasses import dataclass, replace

import pytest
from simulated import SIMPLE, controlled

from cosmos_core.control import ValidationPlan
from cosmos_core.simulation import (
    EngineSpeed,
    LengthConfig,
    LogRecord,
    Span,
    StepTaken,
    SystemConfig,
    simulate,
)

EVERY, ROUND_S = 12, 10.0


@dataclass(frozen=True, kw_only=True, slots=True)
class LongSecond(LengthConfig):
    """Ten tokens, but a hundred of the second answer, which training never asks for."""

    def length(self, ordinal: int, sibling: int) -> int:
        return 100 if sibling else 10


SYSTEM = replace(
    SIMPLE,
    slots=4,
    speed=EngineSpeed(fixed_s=0.1, request_s=0.0, max_running=64),
    lengths=LongSecond(),
    train_s=1.0,
    push_s=0.0,
    swap_s=0.0,
)


def validated(
    system: SystemConfig, *, depth: int, bound: int, prompts: int, groups: int = 1
) -> list[LogRecord]:
    """Return the log of a run with one validation, of the weights of step ``EVERY``."""
    plan = ValidationPlan(num_prompts=prompts, num_samples=2, before=False, every=EVERY)
    config = replace(controlled(depth, bound, groups=groups), validation=plan)
    return simulate(config, system, steps=2 * EVERY)


def steps_of(log: list[LogRecord]) -> list[StepTaken]:
    return [record for record in log if isinstance(record, StepTaken)]


def decoded(log: list[LogRecord], replica: str) -> list[Span]:
    """Return when a rollout has answered by the version that is validated, and nothing newer."""
    spans = [r for r in log if isinstance(r, Span) and r.replica == replica and r.tokens]
    return [span for span in spans if span.version == EVERY]


def num_steps_meanwhile(log: list[LogRecord]) -> int:
    """Count the steps that end while the first rollout has the version that is validated."""
    kept = decoded(log, "rollout-0")
    opened, closed = kept[0].start_s, kept[-1].end_s
    assert closed - opened == pytest.approx(ROUND_S)
    return sum(opened < step.end_s <= closed + 1e-9 for step in steps_of(log))


def longest_wait_s(log: list[LogRecord]) -> float:
    """Return for how long the learner had nothing to train on, at the most, after the first."""
    steps = steps_of(log)
    return max(after.start_s - before.end_s for before, after in itertools.pairwise(steps))


def held_up_s(log: list[LogRecord]) -> float:
    """Return how much of its waiting the learner puts down to validations."""
    spans = [r for r in log if isinstance(r, Span) and r.activity == "eval"]
    return sum(span.end_s - span.start_s for span in spans)


@pytest.mark.parametrize(
    ("depth", "bound", "num_steps", "wait_s"),
    [(1, 1, 2, 9.0), (1, 2, 3, 8.0), (2, 4, 5, 6.0), (8, 8, 9, 2.0), (16, 16, 10, 0.0)],
)
def test_a_lone_rollout_that_answers_a_round_lets_training_go_on_as_far_as_the_bound(
    depth: int, bound: int, num_steps: int, wait_s: float
) -> None:
    """It loads nothing meanwhile: steps of its version and ``bound`` more, and then they wait.

    The last second of the wait is for the samples that the newer version then generates.
    """
    log = validated(SYSTEM, depth=depth, bound=bound, prompts=1)
    assert num_steps_meanwhile(log) == num_steps
    assert longest_wait_s(log) == pytest.approx(wait_s)
    assert held_up_s(log) == pytest.approx(max(0.0, wait_s - 1.0))
    assert max(s.step - x.oldest_version for s in steps_of(log) for x in s.samples) == bound


@pytest.mark.parametrize(("prompts", "wait_s"), [(2, 9.0), (3, 10.0), (4, 10.0), (8, 20.0)])
def test_a_lone_rollout_answers_with_half_of_its_places_until_training_is_at_the_bound(
    prompts: int, wait_s: float
) -> None:
    """Two prompts at first, two more when the last step that may be is sampled, 1 s later."""
    log = validated(SYSTEM, depth=1, bound=1, prompts=prompts)
    opened = decoded(log, "rollout-0")[0].start_s
    meanwhile = sum(opened < step.end_s <= opened + ROUND_S for step in steps_of(log))
    assert meanwhile == 2, "its other places sample for the steps that the bound allows"
    assert longest_wait_s(log) == pytest.approx(wait_s)
    assert held_up_s(log) == pytest.approx(wait_s - 1.0)


@pytest.mark.parametrize("prompts", [1, 3, 8, 40])
@pytest.mark.parametrize("rollouts", [2, 3, 4])
def test_of_several_rollouts_some_answer_nothing_and_training_never_waits(
    rollouts: int, prompts: int
) -> None:
    """Be there as many prompts as take every place of all of them, and several times over."""
    log = validated(replace(SYSTEM, rollouts=rollouts), depth=1, bound=1, prompts=prompts)
    assert longest_wait_s(log) == pytest.approx(0.0)
    assert held_up_s(log) == 0.0
    answering = {f"rollout-{n}" for n in range(rollouts)}
    long = {name for name in answering if sum(s.tokens for s in decoded(log, name)) >= 100}
    assert 0 < len(long) <= rollouts // 2, "at most half of them"


@pytest.mark.parametrize("groups", [2, 4])
def test_who_answers_nothing_has_the_prompts_that_the_others_may_not_have(groups: int) -> None:
    """One of two samples all of each step, which is as many prompts as it has places."""
    log = validated(replace(SYSTEM, rollouts=2), depth=1, bound=1, prompts=8, groups=groups)
    assert longest_wait_s(log) == pytest.approx(0.0)
