"""What is known of a run whose Redis is gone with it: what it left about its own end."""

import json
from typing import Any

from cosmos_core.rundir import RunDirectory


def last_words(run: RunDirectory) -> dict[str, Any]:
    """Return why the last start of a run ended and at which step; empty if it was killed."""
    started = run.path / "namespace"
    if not run.report.exists() or run.report.stat().st_mtime < started.stat().st_mtime:
        return {}
    report: dict[str, Any] = json.loads(run.report.read_text())
    return {
        "finished": report.get("finished", "done"),
        "step": report.get("steps", 0),
        "export": report.get("export", ""),
        "report": str(run.report),
    }


def _why(finished: str | bool) -> str:
    """Say why a run ended, of which runs on given data know only whether all steps were taken."""
    if isinstance(finished, str):
        return finished
    return "all steps done" if finished else "stopped; --resume goes on"


def describe_end(run: RunDirectory) -> str:
    """Say how a run ended that is not running, and what to do."""
    words = last_words(run)
    if words:
        return f"{run.path} has ended at step {words['step']}: {_why(words['finished'])}"
    return (
        f"{run.path} is not running and left no report, as when it was killed; "
        "'cosmos-app run ... --resume' goes on from its newest checkpoint"
    )
