"""The figures and pictures of a run: lines of ``metrics.jsonl``, of the terminal, and loggers."""

import json
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

import click

from cosmos_app.bad_steps import bad_step_line
from cosmos_core.metrics import FanOut, MediaRecord, MetricRecord
from cosmos_core.rundir import write_atomic
from cosmos_parallel import StepReport
from cosmos_wfm import Validated
from cosmos_wfm.sample_rewards import FAILED, REWARD

_ROLE, _REPLICA = "policy", "policy-0"
PARTS = {
    "sample_s": "sampling",
    "reward_s": "rewards",
    "wait_s": "waiting",
    "data_s": "data",
    "train_s": "training",
}
"""Figures of a step's parts, in words."""
_DRAWN_ELSEWHERE = "replica_peak_memory_mib"
_SHORTEST_S = 0.005

Say = Callable[[str], None]


class RunFigures:
    """Writes what a run reports, on the one rank that does."""

    def __init__(
        self, output: Path, num_steps: int, sinks: FanOut, *, writes: bool, say: Say = click.echo
    ) -> None:
        """Get ready.

        Args:
            output: the run's directory.
            num_steps: of the run.
            sinks: the loggers, which stay the caller's.
            writes: whether this is that rank.
            say: shows a line to who looks on.
        """
        self._metrics = output / "metrics.jsonl"
        self._num_steps = num_steps
        self._sinks = sinks
        self._writes = writes
        self._say = say
        self._has_begun = False

    def write(self, step: int, report: StepReport, figures: Mapping[str, float]) -> None:
        """Write the figures of a finished step."""
        if not self._writes:
            return
        values = {**_figures(report), **figures}
        self._add(step, values, report.problem)
        self._say(step_line(step, self._num_steps, values))
        if report.problem:
            self._say(bad_step_line(step, report.problem))

    def show(self, validated: Validated) -> None:
        """Write what validation samples earned, and hand them to the loggers."""
        step, directory = validated.step, validated.directory
        if validated.figures:
            self._add(step, validated.figures)
            self._say(validation_line(validated))
        files = tuple(sorted(p for p in directory.iterdir() if p.suffix in (".png", ".mp4")))
        record = MediaRecord(time.time(), _ROLE, _REPLICA, step, "validation", files)
        self._sinks.show(record)

    def _add(self, step: int, values: Mapping[str, float], note: str = "") -> None:
        if not self._has_begun:
            self._has_begun = True
            keep_before(self._metrics, step, again=values.keys())
        with self._metrics.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, **values}) + "\n")
        self._sinks.write(MetricRecord(time.time(), _ROLE, _REPLICA, step, values, note))


def step_line(step: int, num_steps: int, values: Mapping[str, float]) -> str:
    """Return what a person is told of a step."""
    words = [f"step {step}/{num_steps}", f"loss {values['loss']:.4f}"]
    if "reward" in values:
        words.append(f"reward {values['reward']:.4f}")
    if failed := values.get("rewards_failed"):
        words.append(f"{failed:.0f} samples without reward")
    elsewhere = ("sample_s", "reward_s") if _DRAWN_ELSEWHERE in values else ()
    parts = [
        f"{word} {values[name]:.2f}"
        for name, word in PARTS.items()
        if name not in elsewhere and values.get(name, 0.0) >= _SHORTEST_S
    ]
    words.append(f"{values['step_s']:.2f} s ({', '.join(parts)})")
    words.append(f"{values['samples_per_s']:.3g} samples/s")
    if "mfu" in values:
        words.append(f"MFU {values['mfu']:.0%}")
    words.append(f"{values['peak_memory_mib']:,.0f} MiB")
    return "  ".join(words)


def validation_line(validated: Validated) -> str:
    """Return what a person is told of a validation's rewards."""
    figures = validated.figures
    earned = f"reward {figures[REWARD]:.4f}" if REWARD in figures else "no reward"
    prefix = f"{REWARD}/"
    parts = [
        f"{name.removeprefix(prefix)} {value:.4f}"
        for name, value in figures.items()
        if name.startswith(prefix)
    ]
    line = f"validation after step {validated.step}  {earned}"
    if len(parts) > 1 or (parts and REWARD not in figures):
        line += f" ({', '.join(parts)})"
    if figures[FAILED]:
        line += f"  {figures[FAILED]:.0f} samples failed: {'; '.join(validated.problems[:2])}"
    return line


def keep_before(metrics: Path, step: int, *, again: Collection[str]) -> None:
    """Drop the rows of steps that are taken again, and one that was cut off.

    Args:
        metrics: the file.
        step: of the first row that comes.
        again: its figures; a row of this step that has others stays.

    Raises:
        OSError: if it cannot be written, as on a disk that is full; all rows stay then.
    """
    if not metrics.exists():
        return
    whole = metrics.read_text(encoding="utf-8").rpartition("\n")[0].splitlines()
    kept = [row for row in whole if _stays(json.loads(row), step, again)]
    write_atomic(metrics, "".join(f"{row}\n" for row in kept))


def _stays(row: Mapping[str, float], step: int, again: Collection[str]) -> bool:
    return row["step"] < step or (row["step"] == step and not row.keys() & again)


def _figures(report: StepReport) -> dict[str, float]:
    means = {
        name: report.mean(name, over="samples") for name in report.metrics if name != "samples"
    }
    return {
        "loss": report.loss,
        "grad_norm": report.grad_norm,
        "lr": report.lr,
        "num_passes": float(report.num_passes),
        "skipped": float(report.outcome != "updated"),
        **means,
    }
