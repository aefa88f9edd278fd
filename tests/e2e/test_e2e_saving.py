"""Policies that do not come to an end, as they save or are suspended: their runs do."""

import os
import signal
from pathlib import Path

import pytest
from blocked_saves import block_a_save
from real_runs import ROOT, SMALL, Run, Runner, assert_balanced

SAVE_S = 2.0
NUM_STEPS = 6
# who is suspended is killed after a lease, and what hung_s adds to it
HASTY = ("bus.lease_s=2", "launch.hung_s=5", "reward.timeout_s=2")
SETTINGS = (*SMALL, f"trainer.steps={NUM_STEPS}", f"launch.save_s={SAVE_S}")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def assert_it_said_so(run: Run, place: Path) -> None:
    """It named where it wrote to, and the thread that did."""
    log = (run.output / "logs" / "policy-0.log").read_text()
    said = f"policy-0: writing to {place} (launch.save_s) took more than {SAVE_S:g} s, so it ends"
    assert log.count(said) == 1, run.logs()
    assert "checkpoint_files.py" in log.partition(said)[0]
    died = [(i["name"], i["how"], i["outcome"]) for i in run.report["incidents"]]
    assert died == [("policy-0", "exit code 1", "restarted")]


def test_a_save_that_never_ends_is_given_up_and_the_run_goes_on_from_a_whole_checkpoint(
    runner: Runner,
) -> None:
    run = runner.start(*SETTINGS, "trainer.checkpoint_every=1")
    place = run.output / "checkpoints"
    run.wait_for(lambda: (place / "step-00000000").exists())
    blocked = block_a_save(run.output / "checkpoints", run.process)
    assert run.finish() == 0, run.logs()
    assert_it_said_so(run, place)
    lost = int(blocked.name.rpartition("-")[2])
    steps = [record["step"] for record in run.metrics("controller")]
    assert steps == [*range(lost + 1), *range(lost, NUM_STEPS)]
    assert_balanced(run.report["books"])
    assert sorted(path.name for path in place.iterdir()) == ["step-00000004", "step-00000005"]


def test_a_last_save_that_never_ends_ends_the_run_which_says_what_is_lost(runner: Runner) -> None:
    run = runner.start(*SETTINGS, "trainer.checkpoint_every=0")
    block_a_save(run.output / "checkpoints", run.process)
    assert run.finish() == 3, run.logs()
    assert_it_said_so(run, run.output / "checkpoints")
    assert "policy replicas died before the last weights were saved" in run.text


def test_a_save_in_the_background_that_never_ends_is_given_up_too(runner: Runner) -> None:
    settings = ("trainer.steps=30", "trainer.checkpoint_every=10", f"launch.save_s={SAVE_S}")
    rows = ROOT / "configs" / "data" / "sums.jsonl"
    sft = ROOT / "configs" / "sft.toml"
    run = runner.start(*settings, f"data.path={rows}", recipe=sft)
    block_a_save(run.output / "checkpoints", run.process)
    assert run.finish() == 0, run.logs()
    assert_it_said_so(run, run.output / "checkpoints")
    assert len(run.report["losses"]) == 30


def test_a_learner_on_given_data_that_is_suspended_is_started_again(runner: Runner) -> None:
    rows = ROOT / "configs" / "data" / "sums.jsonl"
    settings = ("trainer.checkpoint_every=5", "launch.hung_s=2")
    run = runner.start(*settings, f"data.path={rows}", recipe=ROOT / "configs" / "sft.toml")
    run.wait_for(lambda: any(run.output.glob("checkpoints/step-*")))
    os.kill(run.child("policy-0"), signal.SIGSTOP)
    assert run.finish() == 0, run.logs()
    assert "policy-0 is suspended, for 2 s: it is killed" in run.text
    died = [(i["name"], i["how"], i["outcome"]) for i in run.report["incidents"]]
    assert died == [("policy-0", "signal 9 (SIGKILL), as it hung", "restarted")]
    assert len(run.report["losses"]) == 100


def test_a_policy_suspended_before_its_last_save_is_ended_and_what_is_lost_is_said(
    runner: Runner,
) -> None:
    run = runner.start(*SETTINGS, *HASTY, "launch.save_s=600", "trainer.checkpoint_every=0")
    block_a_save(run.output / "checkpoints", run.process)
    os.kill(run.child("policy-0"), signal.SIGSTOP)
    assert run.finish(120.0) == 3, run.logs()
    assert "policy-0 has not ended with its run, and has given no sign of life for 7 s" in run.text
    assert "policy replicas died before the last weights were saved" in run.text
    died = [(i["name"], i["how"], i["outcome"]) for i in run.report["incidents"]]
    assert died == [("policy-0", "signal 9 (SIGKILL), as it hung", "gave up")]


def test_a_policy_suspended_after_its_last_save_keeps_no_run_from_its_end(
    runner: Runner, tmp_path: Path
) -> None:
    # what a killed export would have left is removed first: so much takes a while
    much = tmp_path / "much"
    much.mkdir()
    for number in range(20_000):
        (much / str(number)).touch()
    run = runner.start(*SETTINGS, *HASTY, "trainer.checkpoint_every=0")
    run.wait_for(lambda: bool(run.children("policy-0")))
    policy = run.child("policy-0")
    left = run.output / "export" / ".model-exporting"
    left.parent.mkdir(exist_ok=True)
    much.rename(left)
    before_ns = left.stat().st_mtime_ns
    run.wait_for(lambda: not left.exists() or left.stat().st_mtime_ns != before_ns)
    os.kill(policy, signal.SIGSTOP)
    assert run.finish(120.0) == 0, run.logs()
    assert "policy-0 has not ended with its run, and has given no sign of life for 7 s" in run.text
    assert "the export is missing: 'cosmos-app export" in run.text
    assert run.report["finished"] == "all steps done"
    assert [i["outcome"] for i in run.report["incidents"]] == ["gave up"]
    assert (run.output / "checkpoints" / "step-00000005").exists()
