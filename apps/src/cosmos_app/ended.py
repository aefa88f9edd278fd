"""What is known of a run whose Redis is gone with it: what it left about its own end."""

import contextlib
import json
from collections.abc import Generator
from pathlib import Path
from typing import Any

from cosmos_app.errors import (
    DeadlyStepError,
    EqualRewardsError,
    FailingGroupsError,
    InterruptedRunError,
    RunError,
    StandstillError,
    UnrewardedSamplesError,
    UnusablePromptsError,
)
from cosmos_core.control import ALL_DONE, DEADLY, EQUAL, FAILING, STANDSTILL, UNREWARDED, UNUSABLE
from cosmos_core.rundir import NotARunDirectoryError, RunDirectory, write_atomic

_FAILURE_FILE = "failure.txt"
_LIMITS: dict[str, tuple[type[RunError], str]] = {
    UNUSABLE: (
        UnusablePromptsError,
        "the names of all are in events.jsonl. Look at data, tokenizer, and the engine's context "
        "and vocabulary; 'cosmos-app check' compares them",
    ),
    UNREWARDED: (
        UnrewardedSamplesError,
        "correct the reward, or have it return a number for answers that it cannot read; "
        "endurance.unrewarded_samples says how many are waited for at first, and "
        "endurance.unrewarded_in_a_row how many later",
    ),
    EQUAL: (
        EqualRewardsError,
        "look at the samples and their rewards: prompts may be too hard or too easy, or the reward "
        "does not tell answers apart; endurance.equal_groups says how many are waited for",
    ),
    FAILING: (
        FailingGroupsError,
        "go on with --resume once that is mended; endurance.failing_s says how long it is waited "
        "for",
    ),
    STANDSTILL: (
        StandstillError,
        "logs/ may say why; go on with --resume; endurance.standstill_s says how long anybody is "
        "waited for",
    ),
    DEADLY: (
        DeadlyStepError,
        "their logs say of what they died; go on with --resume once that is mended; "
        "endurance.step_attempts says how often it is tried",
    ),
}
"""How a run says that it got no further, the error that it ends with, and what to do."""


@contextlib.contextmanager
def failure_noted(run: RunDirectory) -> Generator[None]:
    """Leave in the run directory with which error a start of a run ended, if it does."""
    path = run.path / _FAILURE_FILE
    path.unlink(missing_ok=True)
    try:
        yield
    except Exception as error:
        with contextlib.suppress(OSError):  # of a full disk maybe: the error itself says so
            write_atomic(path, f"{type(error).__name__}: {error}")
        raise


def require_all_done(finished: str, steps: int) -> None:
    """Say by an error that a run with rollouts ended before its last step.

    Args:
        finished: why it ended.
        steps: how many it has taken.

    Raises:
        UnusablePromptsError: if none of its prompts could be sampled.
        UnrewardedSamplesError: if a reward gave none of its samples a number.
        EqualRewardsError: if none of its groups had rewards that differ.
        FailingGroupsError: if all that it sampled failed.
        StandstillError: if it waited for somebody in vain.
        DeadlyStepError: if policy replicas died of the same step each time.
        InterruptedRunError: if it was stopped otherwise.
    """
    if finished == ALL_DONE:
        return
    for words, (error, advice) in _LIMITS.items():
        if finished.startswith(words):
            raise error(f"stopped at step {steps}: {finished}; {advice}")
    raise InterruptedRunError(f"stopped at step {steps}: {finished}; go on with --resume")


def last_words(run: RunDirectory) -> dict[str, Any]:
    """Return why the last start of a run ended and at which step; empty if it was killed.

    Of one that ended by an error: that it failed, and the error.
    """
    failure = run.path / _FAILURE_FILE
    if failure.exists():
        return {"finished": "failed", "error": failure.read_text(encoding="utf-8")}
    started = run.path / "namespace"
    if not run.report.exists() or run.report.stat().st_mtime < started.stat().st_mtime:
        return {}
    report: dict[str, Any] = json.loads(run.report.read_text())
    export = run.export / "model"  # where it is now: the directory may have been moved
    return {
        "finished": report.get("finished", "done"),
        "step": report.get("steps", 0),
        "export": str(export) if export.exists() else "",
        "report": str(run.report),
    }


def ended_after(run_dir: Path, since_s: float) -> bool:
    """Whether a start of a run has ended, well or not, after a time (seconds since 1970)."""
    try:
        run = RunDirectory.open(run_dir)
    except NotARunDirectoryError:
        return False
    left = [path for path in (run.report, run.path / _FAILURE_FILE) if path.exists()]
    return any(path.stat().st_mtime > since_s for path in left)


def _why(finished: str | bool) -> str:
    """Say why a run ended, of which runs on given data know only whether all steps were taken."""
    if isinstance(finished, str):
        return finished
    return "all steps done" if finished else "stopped; --resume goes on"


def describe_end(run: RunDirectory) -> str:
    """Say how a run ended whose Redis does not answer, and what to do."""
    words = last_words(run)
    if "error" in words:
        return (
            f"{run.path} failed: {words['error']}\n"
            "'cosmos-app run ... --resume' goes on from its newest checkpoint"
        )
    if words:
        return f"{run.path} has ended at step {words['step']}: {_why(words['finished'])}"
    holder = run.holder()
    if holder is not None:
        return (
            f"{run.path} is held by {holder}, and its Redis does not answer: it starts, "
            "ends, or is suspended; stop it if it does not come back, and "
            "'cosmos-app run ... --resume' goes on from its newest checkpoint"
        )
    return (
        f"{run.path} is not running and left no report, as when it was killed; "
        "'cosmos-app run ... --resume' goes on from its newest checkpoint"
    )
