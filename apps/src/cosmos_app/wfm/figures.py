"""The figures and pictures of a run: lines of ``metrics.jsonl``, of the terminal, and loggers."""

import json
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import click

from cosmos_core.metrics import FanOut, MediaRecord, MetricRecord
from cosmos_parallel import StepReport

_ROLE, _REPLICA = "policy", "policy-0"


class RunFigures:
    """Writes what a run reports, on the one rank that does."""

    def __init__(self, output: Path, num_steps: int, sinks: FanOut, *, writes: bool) -> None:
        """Get ready.

        Args:
            output: the run's directory.
            num_steps: of the run.
            sinks: the loggers, which stay the caller's.
            writes: whether this is that rank.
        """
        self._metrics = output / "metrics.jsonl"
        self._num_steps = num_steps
        self._sinks = sinks
        self._writes = writes
        self._has_begun = False

    def write(self, step: int, report: StepReport, figures: Mapping[str, float]) -> None:
        """Write the figures of a finished step."""
        if not self._writes:
            return
        if not self._has_begun:
            self._has_begun = True
            keep_before(self._metrics, step)
        values = {**_figures(report), **figures}
        with self._metrics.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, **values}) + "\n")
        self._sinks.write(MetricRecord(time.time(), _ROLE, _REPLICA, step, values))
        reward = f"  reward {figures['reward']:.4f}" if "reward" in figures else ""
        click.echo(f"step {step}/{self._num_steps}  loss {report.loss:.4f}{reward}")

    def show(self, step: int, directory: Path) -> None:
        """Hand the pictures and videos of a step to the loggers."""
        files = tuple(sorted(p for p in directory.iterdir() if p.suffix in (".png", ".mp4")))
        record = MediaRecord(time.time(), _ROLE, _REPLICA, step, "validation", files)
        self._sinks.show(record)


def keep_before(metrics: Path, step: int) -> None:
    """Drop the rows of steps that are taken again, and one that was cut off."""
    if not metrics.exists():
        return
    whole = metrics.read_text(encoding="utf-8").rpartition("\n")[0].splitlines()
    kept = [row for row in whole if json.loads(row)["step"] < step]
    metrics.write_text("".join(f"{row}\n" for row in kept), encoding="utf-8")


def _figures(report: StepReport) -> dict[str, float]:
    plain = asdict(report)
    figures = {name: float(plain[name]) for name in ("loss", "grad_norm", "lr", "seconds")}
    means = {
        name: report.mean(name, over="samples") for name in report.metrics if name != "samples"
    }
    return {**figures, **means}
