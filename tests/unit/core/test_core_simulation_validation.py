"""How far training gets while a validation is answered, in virtual time.

A step takes 1 s to train and 1 s to generate. Of each held-out prompt two answers are asked, the
second of which takes 10 s: so long a round is open, and who answers it keeps its version.
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


def validated(system: SystemConfig, *, depth: int, bound: int, prompts: int) -> list[LogRecord]:
    """Return the log of a run with one validation, of the weights of step ``EVERY``."""
    plan = ValidationPlan(num_prompts=prompts, num_samples=2, before=False, every=EVERY)
    config = replace(controlled(depth, bound), validation=plan)
    return simulate(config, system, steps=2 * EVERY)


def steps_of(log: list[LogRecord]) -> list[StepTaken]:
    return [record for record in log if isinstance(record, StepTaken)]


def num_steps_meanwhile(log: list[LogRecord]) -> int:
    """Count the steps that end while the first rollout has the version that is validated."""
    kept = [r for r in log if isinstance(r, Span) and r.replica == "rollout-0"]
    kept = [span for span in kept if span.version == EVERY]
    opened, closed = kept[0].start_s, kept[-1].end_s
    assert closed - opened == pytest.approx(ROUND_S)
    return sum(opened < step.end_s <= closed + 1e-9 for step in steps_of(log))


def longest_wait_s(log: list[LogRecord]) -> float:
    """Return for how long the learner had nothing to train on, at the most, after the first."""
    steps = steps_of(log)
    return max(after.start_s - before.end_s for before, after in itertools.pairwise(steps))


@pytest.mark.parametrize(
    ("depth", "bound", "num_steps", "wait_s"),
    [(1, 1, 2, 9.0), (1, 2, 3, 8.0), (2, 4, 5, 6.0), (8, 8, 9, 2.0), (16, 16, 10, 0.0)],
)
def test_a_lone_rollout_that_answers_a_round_lets_training_go_on_as_far_as_the_bound(
    depth: int, bound: int, num_steps: int, wait_s: float
) -> None:
    """It loads nothing meanwhile: steps of its version and ``bound`` more, and then they wait."""
    log = validated(SYSTEM, depth=depth, bound=bound, prompts=1)
    assert num_steps_meanwhile(log) == num_steps
    assert longest_wait_s(log) == pytest.approx(wait_s)
    assert max(s.step - x.oldest_version for s in steps_of(log) for x in s.samples) == bound


@pytest.mark.parametrize(("prompts", "num_steps", "wait_s"), [(3, 10, 0.0), (8, 1, 10.0)])
def test_a_rollout_that_answers_nothing_keeps_training_going_at_any_bound(
    prompts: int, num_steps: int, wait_s: float
) -> None:
    """Three prompts leave one of two rollouts free; eight take every place of both."""
    log = validated(replace(SYSTEM, rollouts=2), depth=1, bound=1, prompts=prompts)
    assert num_steps_meanwhile(log) == num_steps
    assert longest_wait_s(log) == pytest.approx(wait_s)
