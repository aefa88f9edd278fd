"""Policies whose file system is gone while they save: they end themselves, and their runs go on.

What stands for such a file system is a pipe that nobody reads, in the place of a file of the
checkpoint: to open it for writing takes for ever.
"""

import contextlib
import os
from pathlib import Path

import pytest
from real_runs import ROOT, SMALL, Run, Runner, assert_balanced

SAVE_S = 2.0
NUM_STEPS = 6
SETTINGS = (*SMALL, f"trainer.steps={NUM_STEPS}", f"launch.save_s={SAVE_S}")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def block_a_save(run: Run) -> Path:
    """Put the pipe where a save that is going on has yet to write; return its directory."""
    found = list[Path]()

    def is_put() -> bool:
        for writing in run.output.glob("checkpoints/.writing-[0-9]*"):
            # it has got so far already, or is over
            with contextlib.suppress(FileExistsError, FileNotFoundError):
                os.mkfifo(writing / "manifest.json")
                found.append(writing)
                return True
        return False

    while run.process.poll() is None and not is_put():
        pass
    assert found, "no save could be blocked"
    return found[0]


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
    blocked = block_a_save(run)
    assert run.finish() == 0, run.logs()
    assert_it_said_so(run, place)
    lost = int(blocked.name.rpartition("-")[2])
    steps = [record["step"] for record in run.metrics("controller")]
    assert steps == [*range(lost + 1), *range(lost, NUM_STEPS)]
    assert_balanced(run.report["books"])
    assert sorted(path.name for path in place.iterdir()) == ["step-00000004", "step-00000005"]


def test_a_last_save_that_never_ends_ends_the_run_which_says_what_is_lost(runner: Runner) -> None:
    run = runner.start(*SETTINGS, "trainer.checkpoint_every=0")
    block_a_save(run)
    assert run.finish() == 3, run.logs()
    assert_it_said_so(run, run.output / "checkpoints")
    assert "policy replicas died before the last weights were saved" in run.text


def test_a_save_in_the_background_that_never_ends_is_given_up_too(runner: Runner) -> None:
    settings = ("trainer.steps=30", "trainer.checkpoint_every=10", f"launch.save_s={SAVE_S}")
    rows = ROOT / "configs" / "data" / "sums.jsonl"
    sft = ROOT / "configs" / "sft.toml"
    run = runner.start(*settings, f"data.path={rows}", recipe=sft)
    block_a_save(run)
    assert run.finish() == 0, run.logs()
    assert_it_said_so(run, run.output / "checkpoints")
    assert len(run.report["losses"]) == 30
