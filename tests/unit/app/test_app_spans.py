"""What a policy's time goes into: spans in the format of simulations, and the figures of a step."""

import itertools
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from cosmos_app.dashboard.history import Lane, Span
from cosmos_app.roles.spans import PolicyTime, UpdateClock, open_diary
from cosmos_core.messages import SampleRef, Train
from cosmos_core.simulation import Span as LogSpan
from cosmos_core.simulation import StepTaken, read_log

SAMPLE = SampleRef(sibling=0, status="completed", key="k", num_tokens=3, oldest_version=1)


@contextmanager
def measured() -> Generator[list[float]]:
    """Return, once the block is left, for how long it took."""
    found: list[float] = []
    begun = time.monotonic()
    yield found
    found.append(time.monotonic() - begun)


def updated(optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()


def test_a_policy_writes_each_part_of_its_steps_and_checkpoints(tmp_path: Path) -> None:
    spent = PolicyTime(open_diary(tmp_path, "policy", "policy-0"))
    train = Train(step=2, groups=((SAMPLE,),), publish=True, validated_s=0.01)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))])
    time.sleep(0.03)
    with spent.spent("training", 2):
        time.sleep(0.02)
        updated(optimizer)
        with measured() as published:
            time.sleep(0.01)
    found = spent.step(train, {"train_s": 0.02, "publish_s": published[0], "mfu": 0.25})
    with measured() as saved, spent.spent("saving", 3):
        time.sleep(0.01)
    with spent.spent("training", 3):
        pass
    again = spent.step(Train(step=3, groups=((SAMPLE,),), publish=False), {})
    spent.close()
    log = read_log([tmp_path / "spans" / "policy-0.jsonl"])
    spans = [record for record in log if isinstance(record, LogSpan)]
    parts = [span.activity for span in spans if span.version == 2]
    assert parts == ["eval", "wait_data", "fwd_bwd", "optim"]
    assert [span.activity for span in spans if span.version == 3][:2] == [
        "push_exposed",
        "wait_data",
    ]
    assert "checkpoint" in [span.activity for span in spans]
    assert all(a.end_s == b.start_s for a, b in itertools.pairwise(spans))
    eval_span = next(span for span in spans if span.activity == "eval")
    assert eval_span.end_s - eval_span.start_s == pytest.approx(0.01, abs=1e-3)
    assert [record.step for record in log if isinstance(record, StepTaken)] == [2, 3]
    assert found["wait_s"] >= 0.03
    assert found["validate_s"] == pytest.approx(0.01)
    assert 0 < found["optim_s"] < 0.02
    assert found["mfu_fwd_bwd"] == pytest.approx(0.25 * 0.02 / (0.02 - found["optim_s"]))
    assert 0 < found["mfu_wall_clock"] < 0.25
    assert 0 < again["save_s"] <= saved[0]
    assert "mfu_wall_clock" not in again


def test_a_learner_on_given_data_writes_what_it_measures_on_what_was_held_back(
    tmp_path: Path,
) -> None:
    spent = PolicyTime(open_diary(tmp_path, "policy", "learner-0"))
    with spent.spent("evaluating", 1):
        time.sleep(0.01)
    spent.close()
    log = read_log([tmp_path / "spans" / "learner-0.jsonl"])
    assert [r.activity for r in log if isinstance(r, LogSpan)] == ["wait_data", "eval"]


def test_updates_are_timed_until_the_clock_is_closed() -> None:
    clock = UpdateClock()
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))])
    updated(optimizer)
    assert clock.take() > 0
    assert clock.take() == 0
    clock.close()
    updated(optimizer)
    assert clock.take() == 0


def test_a_policy_of_a_trainer_that_keeps_its_own_diary_writes_nothing(tmp_path: Path) -> None:
    spent = PolicyTime(None)
    with spent.spent("training", 0):
        assert spent.is_busy
    assert set(spent.step(Train(step=0, groups=(), publish=False), {})) == {"wait_s", "optim_s"}
    spent.close()
    assert not list(tmp_path.iterdir())


def test_a_full_disk_costs_a_diary_only_what_it_says(tmp_path: Path) -> None:
    diary = open_diary(tmp_path, "rollout", "r")
    (tmp_path / "spans" / "r.jsonl").mkdir()  # cannot be appended to
    diary.note("decode", time.monotonic() + 1.0, version=0, width=1)
    diary.close()


def test_the_timeline_has_the_parts_of_a_step_in_their_order() -> None:
    lane = Lane("policy")
    values = {"save_s": 1.0, "wait_s": 3.0, "validate_s": 2.0, "train_s": 4.0}
    lane.take_step(20.0, {**values, "optim_s": 1.0, "publish_s": 0.5})
    told = [(*span.shares, span.start_s, span.end_s) for span in lane.spans]
    assert told == [
        ("saving", 11.5, 12.5),
        ("validating", 12.5, 14.5),
        ("training", 15.5, 18.5),
        ("updating", 18.5, 19.5),
        ("publishing", 19.5, 20.0),
    ]


def test_what_was_withheld_before_a_reading_is_taken_from_what_was_idle() -> None:
    """Of 3 s: the last two spans idled for 2 and 0.5 s, and the one before them was at work."""
    lane = Lane("rollout")
    lane.spans.extend(
        [
            Span(0.0, 2.0, {"generating": 1.0}),
            Span(2.0, 4.0, {"generating": 0.75}),
            Span(4.0, 6.0, {}),
        ]
    )
    lane.withhold(3.0)
    assert [dict(span.shares) for span in lane.spans] == [
        {"generating": 1.0, "withheld": 0.0},
        {"generating": 0.75, "withheld": 0.25},
        {"withheld": 1.0},
    ]
