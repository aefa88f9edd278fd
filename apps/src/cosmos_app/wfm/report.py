"""The report of a world model's run, all of it computed from its ``metrics.jsonl``."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from rich.console import Console

from cosmos_app.output import from_to, print_facts
from cosmos_app.wfm.dashboard.recorded import read_figures
from cosmos_app.wfm.figures import PARTS

_SPEEDS = (
    "samples_per_s",
    "generated_per_s_per_rank",
    "trained_per_s_per_rank",
    "tokens_per_s_per_rank",
    "tflops_per_s_per_rank",
    "mfu",
)
_MEMORY = ("peak_memory_mib", "replica_peak_memory_mib")


@dataclass(frozen=True, kw_only=True, slots=True)
class WorldModelReport:
    """What a run did; of several starts together, where it went on.

    Attributes:
        run_dir: where it all lies.
        finished: whether it took all of its steps.
        steps: optimizer steps taken.
        skipped: steps that changed nothing: loss or gradient was not finite, or no two samples of a
            prompt had a reward.
        samples_trained: samples that were drawn and trained on; 0 of supervised runs.
        samples_left_out: samples that were drawn and not: without reward, or alone with one in
            their group.
        rewards_failed: samples without a reward.
        seconds: of all steps, without what was written and drawn between them.
        step_s: of a step, median.
        part_s: of the parts of a step, medians.
        speeds: samples, tokens and operations per second, and MFU where it is known: medians.
        memory_mib: the most that a process held: of ranks, and of replicas where there are any.
        losses: by step.
        rewards: mean reward by step; empty of supervised runs.
        validation_rewards: mean reward of validation samples by step; empty where nobody rewards.
        validation_failed: validation samples of which a reward failed.
        export: directory that diffusers loads; empty if the run did not come to its end.
    """

    run_dir: str
    finished: bool
    steps: int
    skipped: int
    samples_trained: int
    samples_left_out: int
    rewards_failed: int
    seconds: float
    step_s: float
    part_s: Mapping[str, float]
    speeds: Mapping[str, float]
    memory_mib: Mapping[str, float]
    losses: Mapping[int, float]
    rewards: Mapping[int, float]
    validation_rewards: Mapping[int, float]
    validation_failed: int
    export: str


def world_model_report(run_dir: Path, *, num_steps: int, export: str) -> WorldModelReport:
    """Read the figures of a run and sum them up.

    Args:
        run_dir: of the run.
        num_steps: that the recipe wants.
        export: directory of the last save; empty if it was stopped before.
    """
    rows = _rows(run_dir / "metrics.jsonl")
    losses = _by_step(rows, "loss")
    steps = max(losses, default=0)
    return WorldModelReport(
        run_dir=str(run_dir),
        finished=steps >= num_steps,
        steps=steps,
        skipped=_count(rows, "skipped"),
        samples_trained=_count(rows, "samples_trained"),
        samples_left_out=_count(rows, "samples_left_out"),
        rewards_failed=_count(rows, "rewards_failed"),
        seconds=sum(_by_step(rows, "step_s").values()),
        step_s=_medians(rows, ["step_s"]).get("step_s", 0.0),
        part_s=_medians(rows, list(PARTS)),
        speeds=_medians(rows, _SPEEDS),
        memory_mib={
            name: max(found.values()) for name in _MEMORY if (found := _by_step(rows, name))
        },
        losses=losses,
        rewards=_by_step(rows, "reward"),
        validation_rewards=_by_step(rows, "validation/reward"),
        validation_failed=_count(rows, "validation/failed"),
        export=export,
    )


def print_world_model_report(report: WorldModelReport, console: Console) -> None:
    """Show a report to a person."""
    parts = [f"{name.removesuffix('_s')} {value:.2f}" for name, value in report.part_s.items()]
    facts = [
        ("steps", f"{report.steps}" + (f", {report.skipped} skipped" if report.skipped else "")),
        ("loss", from_to(report.losses)),
        *([("reward", from_to(report.rewards))] if report.rewards else []),
        *(("samples", text) for text in _samples_text(report)),
        *(("validation reward", text) for text in _validation_text(report)),
        ("seconds", f"{report.seconds:.1f}, {report.step_s:.2f} a step ({', '.join(parts)})"),
        *((name, f"{value:.3g}") for name, value in report.speeds.items()),
        *((name, f"{value:,.0f}") for name, value in report.memory_mib.items()),
        ("model", report.export or "not written: the run did not come to its end"),
    ]
    print_facts(report.run_dir, facts, console)


def _samples_text(report: WorldModelReport) -> list[str]:
    if not report.samples_left_out:
        return []
    return [
        f"{report.samples_trained:,} trained on, {report.samples_left_out:,} left out, as "
        f"{report.rewards_failed:,} had no reward"
    ]


def _validation_text(report: WorldModelReport) -> list[str]:
    failed = f", {report.validation_failed} samples failed" if report.validation_failed else ""
    is_told = report.validation_rewards or failed
    return [f"{from_to(report.validation_rewards)}{failed}"] if is_told else []


def _rows(metrics: Path) -> list[tuple[int, dict[str, float]]]:
    if not metrics.exists():
        return []
    found = (read_figures(line) for line in metrics.read_bytes().splitlines())
    return [row for row in found if row is not None]


def _by_step(rows: Sequence[tuple[int, Mapping[str, float]]], name: str) -> dict[int, float]:
    return {step: values[name] for step, values in rows if name in values}


def _count(rows: Sequence[tuple[int, Mapping[str, float]]], name: str) -> int:
    return int(sum(_by_step(rows, name).values()))


def _medians(
    rows: Sequence[tuple[int, Mapping[str, float]]], names: Sequence[str]
) -> dict[str, float]:
    found = {name: list(_by_step(rows, name).values()) for name in names}
    return {name: median(values) for name, values in found.items() if values}
