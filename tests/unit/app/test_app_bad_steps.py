"""Steps that were not finite, as who started a run hears of them."""

import json
import math
from pathlib import Path

from rich.text import Text

from cosmos_app.bad_steps import BadStepWarning
from cosmos_app.errors import exit_code_of
from cosmos_app.wfm.figures import RunFigures
from cosmos_core.metrics import FanOut, JsonlSink, MetricRecord, read_metrics
from cosmos_parallel import NonFiniteStepError, StepReport

NOTE = "rank 1 of policy-1: micro-batch 0 (group train.0.7 sibling 3) has loss nan; written to x.pt"


def record(replica: str, step: int, note: str = "") -> MetricRecord:
    return MetricRecord(0.0, "policy", replica, step, {"loss": 0.5}, note)


def test_a_bad_step_is_told_once_with_rank_and_sample_and_what_to_do() -> None:
    told = list[str]()
    warning = BadStepWarning(told.append)
    for replica in ("policy-0", "policy-1"):
        warning.look(record(replica, 4))
        warning.look(record(replica, 5, NOTE))
    (line,) = (Text.from_markup(each).plain for each in told)
    assert line.startswith(f"step 6 changed nothing: {NOTE}. Look at these samples")
    assert "lower learner.optimizer.lr" in line
    assert line.endswith("more than learner.max_non_finite_steps in a row end the run")


def test_a_note_is_kept_with_the_measurements_of_its_step(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path / "metrics.jsonl")
    records = [record("policy-0", 4), record("policy-0", 5, NOTE)]
    for each in records:
        sink.write(each)
    sink.close()
    assert read_metrics(tmp_path / "metrics.jsonl") == records
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line).get("note") for line in lines] == [None, NOTE]


def test_a_run_of_a_world_model_tells_a_bad_step_too(tmp_path: Path) -> None:
    told = list[str]()
    report = StepReport(
        outcome="non_finite", loss=math.nan, weight=2.0, grad_norm=math.nan, lr=1e-4,
        metrics={"samples": 2.0}, num_passes=1, seconds=1.0, problem=NOTE,
    )  # fmt: skip
    speed = {"step_s": 1.0, "samples_per_s": 2.0, "peak_memory_mib": 64.0}
    sink = JsonlSink(tmp_path / "sink.jsonl")
    RunFigures(tmp_path, 8, FanOut([sink]), writes=True, say=told.append).write(6, report, speed)
    sink.close()
    assert told[1].startswith(f"step 6 changed nothing: {NOTE}. Look at these samples")
    assert [record.note for record in read_metrics(tmp_path / "sink.jsonl")] == [NOTE]


def test_too_many_bad_steps_end_a_run_instead_of_starting_its_processes_again() -> None:
    assert exit_code_of(NonFiniteStepError("4 steps in a row were not finite")) == 2
