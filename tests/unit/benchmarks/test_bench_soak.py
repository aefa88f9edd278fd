"""What the soak takes for a run that went well: every step once, and nothing left in its books."""

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).resolve().parents[3] / "benchmarks"))

from soak_judge import GROUPS, SAMPLES, judge, judge_samples

from cosmos_core.control import payload_key
from cosmos_core.messages import GroupId
from cosmos_core.metrics import JsonlSink, MetricRecord
from cosmos_core.simulation import StepTaken, TrainedSample

STEPS = 3
NONE = {"waiting": 0, "generating": 0, "ready": 0, "training": 0}


@pytest.fixture
def output(tmp_path: Path) -> Path:
    """A run that has committed its steps."""
    with_steps(tmp_path, range(STEPS))
    return tmp_path


def with_steps(output: Path, steps: range) -> None:
    sink = JsonlSink(output / "metrics.jsonl")
    for step in steps:
        sink.write(MetricRecord(role="controller", replica="", step=step, time_s=0.0, values={}))
    sink.close()


def books(**changes: object) -> dict[str, Any]:
    consumed = STEPS * GROUPS
    return {
        "books": {
            "issued": consumed, "consumed": consumed, "dropped": {}, "in_flight": NONE, **changes,
        }
    }  # fmt: skip


def test_a_run_that_trained_on_every_group_once_went_well(output: Path) -> None:
    assert judge(output, books(), STEPS) == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"issued": STEPS * GROUPS + 1, "dropped": {"too stale": 1}}, "were dropped: {'too stale'"),
        ({"issued": STEPS * GROUPS + 2, "in_flight": {**NONE, "ready": 2}}, "flight: {'ready': 2}"),
        ({"issued": STEPS * GROUPS + 1}, "the books do not balance"),
        ({"issued": 11, "consumed": 11}, "11 groups were trained on, not 12"),
    ],
)
def test_a_group_that_is_dropped_in_flight_or_lost_is_told(
    output: Path, changes: dict[str, object], words: str
) -> None:
    (problem,) = judge(output, books(**changes), STEPS)
    assert words in problem


def test_a_step_that_was_never_committed_is_told(tmp_path: Path) -> None:
    with_steps(tmp_path, range(STEPS - 1))
    assert judge(tmp_path, books(), STEPS) == ["steps [2] were never committed"]


def a_step(
    step: int, groups: range | list[int], attempt: int = 0, siblings: int = SAMPLES
) -> StepTaken:
    keys = tuple(
        payload_key(GroupId(source="train", round=0, ordinal=n), attempt, i)
        for n in groups
        for i in range(siblings)
    )
    samples = (TrainedSample(1, 0, 0),) * len(keys)
    return StepTaken(step=step, start_s=0.0, end_s=1.0, samples=samples, keys=keys)


WELL = [a_step(step, range(GROUPS * step, GROUPS * (step + 1))) for step in range(STEPS)]


def test_a_step_that_was_taken_anew_counts_as_it_was_last() -> None:
    before = [a_step(1, range(8, 12)), a_step(2, range(4, 8))]
    assert judge_samples([WELL[0], *before, *WELL[1:]], STEPS * GROUPS, STEPS) == []


@pytest.mark.parametrize(
    ("last", "words"),
    [
        (a_step(2, [4, 9, 10, 11]), "groups [4] were trained on in several steps"),
        (a_step(2, [4, 9, 10, 11], attempt=1), "groups [4] were trained on in several steps"),
        (a_step(2, [8, 8, 9, 10, 11]), "trained on twice: train.0.8.0.0, train.0.8.0.1"),
        (a_step(2, [9, 10, 11]), "groups [8] were issued and never trained on"),
        (
            a_step(2, range(8, 12), siblings=1),
            "of train.0.10.0, train.0.11.0, train.0.8.0, train.0.9.0 not",
        ),
        (a_step(2, [9, 10, 11]), "steps [2] were not taken on 4 groups"),
    ],
)
def test_a_sample_that_is_lost_or_trained_on_twice_is_told(last: StepTaken, words: str) -> None:
    problems = judge_samples([*WELL[:2], last], STEPS * GROUPS, STEPS)
    assert any(words in problem for problem in problems)
