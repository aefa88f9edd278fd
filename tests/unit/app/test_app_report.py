"""What a run says of itself at its end."""

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from cosmos_app.frame import hand_in
from cosmos_app.output import print_facts
from cosmos_app.report import Outcome, build_report, print_report
from cosmos_app.status import draw_status
from cosmos_core.metrics import MetricRecord
from cosmos_core.rundir import RunDirectory


def test_the_distance_of_log_probs_is_a_mean_over_tokens_not_over_steps():
    steps = [
        {"tokens": 100.0, "mismatch_abs": 1e-6, "lag0_abs": 1e-6, "lag0_tokens": 1.0},
        {"tokens": 100.0, "mismatch_abs": 0.1, "lag0_tokens": 0.0},
        {"tokens": 200.0, "mismatch_abs": 0.2, "lag0_abs": 0.05, "lag0_tokens": 0.01},
    ]
    records = [
        MetricRecord(time_s=0.0, role="policy", replica="policy-0", step=step, values=values)
        for step, values in enumerate(steps)
    ]
    report = build_report(records, outcome())
    assert report.mismatch[0] == pytest.approx((100 * 1e-6 + 2 * 0.05) / 102)
    assert report.mismatch[1] == pytest.approx((100 * 1e-6 + 100 * 0.1 + 200 * 0.2) / 400)


def test_what_publications_cost_is_told_of_each_replica():
    """How long each policy stood still, and after how long each rollout served them."""
    told = [
        ("policy", "policy-0", {"publish_s": 0.25, "publications_skipped": 0.0}),
        ("policy", "policy-0", {"publish_s": 0.5, "publications_skipped": 1.0}),
        ("rollout", "rollout-0", {"served_s": 1.0}),
        ("rollout", "rollout-10", {"served_s": 3.0}),
        ("rollout", "rollout-2", {"served_s": 2.0}),
    ]
    records = [
        MetricRecord(time_s=0.0, role=role, replica=name, step=step, values=values)
        for step, (role, name, values) in enumerate(told)
    ]
    report = build_report(records, outcome())
    assert report.publish_ms_of == {"policy-0": (500.0, 500.0)}
    assert report.served_s_of == {
        "rollout-0": (1.0, 1.0),
        "rollout-2": (2.0, 2.0),
        "rollout-10": (3.0, 3.0),
    }
    shown = io.StringIO()
    print_report(report, Console(file=shown, width=120))
    lines = [" ".join(line.split()) for line in shown.getvalue().splitlines()]
    assert any("rollout-10 median 3.00 s, max 3.00 s" in line for line in lines)
    assert not any("policy-0" in line for line in lines), "one alone has the figure of all"
    assert report.publications_skipped == 1
    assert any("stalled median 500.0 ms, max 500.0 ms, 1 skipped" in line for line in lines)


def test_how_long_training_waited_for_validations_is_told_in_all_and_of_one_step():
    records = [
        MetricRecord(0.0, "controller", "controller", step, {"validated_s": seconds})
        for step, seconds in enumerate([4.0, 0.0, 1.5])
    ]
    report = build_report(records, outcome())
    assert report.validated_s == (5.5, 4.0)
    shown = io.StringIO()
    print_report(report, Console(file=shown, width=120))
    said = " ".join(shown.getvalue().split())
    assert "training held up by validations 5.50 s, one step 4.00 s at most" in said


def test_what_loads_fetched_is_told_as_their_median_and_the_most():
    records = [
        MetricRecord(0.0, "rollout", "rollout-0", step, {"stall_s": 0.1, "wire_mib": mib})
        for step, mib in enumerate([0.5, 2.0, 0.25])
    ]
    report = build_report(records, outcome())
    assert report.wire_mib == (0.5, 2.0)
    shown = io.StringIO()
    print_report(report, Console(file=shown, width=120))
    assert "weights fetched per load" in shown.getvalue()
    assert "median 0.5 MiB, max 2 MiB" in shown.getvalue()


def test_what_was_not_measured_is_null_for_programs_and_a_dash_for_people():
    report = build_report([], outcome())
    text = json.dumps(report.to_json(), allow_nan=False)
    assert json.loads(text)["rollout_idle"] is None
    shown = io.StringIO()
    print_report(report, Console(file=shown, width=120))
    assert "nan" not in shown.getvalue()


def test_a_step_whose_loss_was_not_finite_leaves_json_that_others_read(tmp_path, capsys):
    report = {"losses": {0: 1.5, 1: float("nan"), 2: float("inf")}, "paths": (tmp_path,)}
    with RunDirectory.create(tmp_path / "run", config_json="{}", now_s=0.0) as run:
        hand_in(report, run, lambda: None, as_json=True)
        kept = run.report.read_text()
    printed = capsys.readouterr().out
    for text in (kept, printed):
        told = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
        assert told["losses"] == {"0": 1.5, "1": None, "2": None}
        assert told["paths"] == [str(tmp_path)]


def test_names_with_square_brackets_are_shown_as_they_are():
    """Directories are called after settings, and failures tell of tokens such as [/INST]."""
    where = Path("/runs/[lr=1e-4]/" + "a-long-name-of-a-run/" * 6)
    told = outcome(run_dir=where, export=str(where / "model"), failures={"reward/[/INST]": 3})
    shown = io.StringIO()
    print_report(build_report([], told), Console(file=shown, width=80))
    assert f"Hugging Face checkpoint: {where / 'model'}\n" in shown.getvalue()
    assert "3 of reward/[/INST]" in shown.getvalue()
    facts = io.StringIO()
    print_facts("runs/[lr=1e-4]", [("died", "rollout-0: [/INST] is no token")], Console(file=facts))
    assert "runs/[lr=1e-4]" in facts.getvalue()
    assert "[/INST] is no token" in facts.getvalue()


def test_status_shows_what_failed_at_a_replica_as_it_was_said():
    replica = {"role": "rollout", "version": 3, "silent_s": 0.5, "last_failure": "no [/INST] in it"}
    shown = io.StringIO()
    status = {"time_s": 0.0, "replicas": {"rollout-0": replica}}
    Console(file=shown, width=120).print(draw_status(status, 1.0))
    assert "no [/INST] in it" in shown.getvalue()


def test_status_shows_what_new_weights_cost_each_replica():
    policy = {"role": "policy", "version": 4, "silent_s": 0.5, "publish_ms": 12.34, "skipped": 2}
    rollout = {"role": "rollout", "version": 4, "silent_s": 0.5, "served_s": 0.456}
    shown = io.StringIO()
    status = {"time_s": 0.0, "replicas": {"policy-0": policy, "rollout-0": rollout}}
    Console(file=shown, width=120).print(draw_status(status, 1.0))
    assert "held up 12.3 ms, 2 skipped" in " ".join(shown.getvalue().split())
    assert "served after 0.46 s" in shown.getvalue()


def outcome(**changes: Any) -> Outcome:
    told = Outcome(
        run_dir=Path("run"),
        finished="all steps done",
        seconds=1.0,
        accuracies={},
        best_of_several={},
        books={},
        failures={},
        incidents=(),
        samples=(),
        export="",
    )
    return replace(told, **changes)
