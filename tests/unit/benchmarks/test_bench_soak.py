"""What the soak takes for a run that went well: every step once, and nothing left in its books."""

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).resolve().parents[3] / "benchmarks"))

from soak import GROUPS, judge

from cosmos_core.metrics import JsonlSink, MetricRecord

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
