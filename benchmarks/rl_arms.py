"""The arms of the RL benchmark: how each system is run on the workload, and what is read from it.

The clock of an arm starts when it begins to generate: imports and engine start are given apart.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from curves import Point
from measure import Usage, cpu_at, measure
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl_environment import trl_python
from workload import Task, Workload, greedy_accuracy, read_rows

from cosmos_app.recipe import Recipe
from cosmos_core.metrics import MetricRecord, read_metrics
from cosmos_parallel import AdamWConfig

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
ROLLOUT_REPORT_S = 2.0
QUIET = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
_STEP_BY_STEP = "staleness={depth=0, bound=0}"
COSMOS_ARMS: Mapping[str, tuple[str, ...]] = {
    "async": (),
    "async-unstaged": ("weight_sync.staged=false",),
    "sync": (_STEP_BY_STEP,),
    "sync-colocated": (_STEP_BY_STEP, "rollout.colocate=keep"),
    "block-4": ("staleness={depth=2, bound=4}",),
    "block-4-unstaged": ("staleness={depth=2, bound=4}", "weight_sync.staged=false"),
    "block-2": ("staleness={depth=2, bound=2}",),
    "drop-2": ("staleness={depth=2, bound=2, policy='drop'}",),
    "count": ("staleness={depth=2, bound=4, policy='count'}",),
    "window": ("staleness={depth=2, bound=4, policy='window'}",),
}
"""What an arm changes of the recipe, whose own depth and bound ``async`` has: one step off."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Shared:
    """What all arms share, taken from the recipe; as plain numbers, to be written down.

    Attributes:
        recipe: the recipe's file.
        steps: optimizer steps of an arm.
        prompts: prompts in a step.
        samples: samples of each prompt.
        lr: of AdamW.
        beta2: of AdamW.
        ramp_steps: of the learning rate's linear warm-up.
        max_grad_norm: gradients are clipped to this.
        max_new_tokens: longest response.
        rollouts: rollout replicas of the cosmos arms.
        targets: rewards whose times are compared.
        trl_micro_batch: samples that TRL trains on at once.
        deadline_s: longest time for one arm.
    """

    recipe: str
    steps: int
    prompts: int
    samples: int
    lr: float
    beta2: float
    ramp_steps: int
    max_grad_norm: float
    max_new_tokens: int
    rollouts: int
    targets: tuple[float, ...]
    trl_micro_batch: int
    deadline_s: float = 1800.0


def shared_of(path: Path, recipe: Recipe, task: Task, *, steps: int, rollouts: int) -> Shared:
    """Return what the arms share.

    Raises:
        ValueError: if the baseline cannot be given the recipe's optimizer or loss.
    """
    optimizer = recipe.learner.optimizer
    if not isinstance(optimizer, AdamWConfig) or optimizer.schedule.shape != "constant":
        raise ValueError(f"{path}: the baseline is set up for AdamW at a constant rate only")
    if recipe.algorithm.kind != "grpo":
        raise ValueError(f"{path}: the baseline is set up for grpo, found {recipe.algorithm.kind}")
    return Shared(
        recipe=str(path),
        steps=steps,
        prompts=recipe.trainer.groups_per_step,
        samples=recipe.trainer.samples_per_group,
        lr=optimizer.lr,
        beta2=optimizer.betas[1],
        ramp_steps=optimizer.schedule.num_warmup_steps,
        max_grad_norm=recipe.learner.max_grad_norm,
        max_new_tokens=recipe.rollout.sampling.max_new_tokens,
        rollouts=rollouts,
        targets=task.targets,
        trl_micro_batch=task.trl_micro_batch,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class ArmResult:
    """One run of one arm.

    Attributes:
        arm: its name.
        repeat: from 0.
        setup_s: from the start of the first process to the start of the clock.
        points: the learning curve.
        accuracies: held-out greedy accuracy by step, measured after the run.
        cpu_s: of all processes, start-up included.
        peak_rss_mib: highest sum of resident sets.
        peak_pss_mib: the same with shared pages counted once.
        others_cpus: CPUs that the rest of the machine kept busy.
        shares: idle shares, staleness and the like, where the system reports them.
    """

    arm: str
    repeat: int
    setup_s: float
    points: tuple[Point, ...]
    accuracies: tuple[tuple[int, float], ...]
    cpu_s: float
    peak_rss_mib: float
    peak_pss_mib: float
    others_cpus: float
    shares: Mapping[str, float]


def _finish(usage: Usage, **found: Any) -> ArmResult:
    return ArmResult(
        cpu_s=usage.cpu_s,
        peak_rss_mib=usage.peak_rss_mib,
        peak_pss_mib=usage.peak_pss_mib,
        others_cpus=usage.others_cpus,
        **found,
    )


def cosmos_overrides(shared: Shared, workload: Workload, seed: int, output: Path) -> list[str]:
    """Return what turns the recipe into an arm: the shared model and data, and nothing extra."""
    return [
        f"seed={seed}",
        f"output={output}",
        f"model.path={workload.model}",
        f"data.path={workload.train}",
        f"data.held_out_path={workload.held_out}",
        f"trainer.steps={shared.steps}",
        "trainer.checkpoint_every=0",
        f"rollout.replicas={shared.rollouts}",
        "validation.before=false",
        "validation.after=false",
        'sinks=[{kind="jsonl"}]',
    ]


def run_cosmos(arm: str, repeat: int, shared: Shared, workload: Workload, out: Path) -> ArmResult:
    """Run one cosmos arm by its command line and read what it left behind."""
    run_dir = out / "run"
    command = [sys.executable, "-m", "cosmos_app", "run", shared.recipe]
    command += [*cosmos_overrides(shared, workload, repeat, run_dir), *COSMOS_ARMS[arm]]
    log = out / "log.txt"
    usage = measure(command, environment=QUIET, log=log, deadline_s=shared.deadline_s)
    records = read_metrics(run_dir / "metrics.jsonl")
    return _finish(
        usage,
        arm=arm,
        repeat=repeat,
        setup_s=clock_start(records) - usage.started_s,
        points=cosmos_points(records, usage),
        accuracies=((shared.steps, _accuracy(run_dir / "export" / "model", workload, shared)),),
        shares=cosmos_shares(json.loads((run_dir / "report.json").read_text()), records),
    )


def cosmos_points(records: Sequence[MetricRecord], usage: Usage) -> tuple[Point, ...]:
    """Return the learning curve of a run."""
    start = clock_start(records)
    ready_cpu_s = cpu_at(usage.cpu_series, start - usage.started_s)
    return tuple(
        Point(
            step=record.step,
            seconds=record.time_s - start,
            cpu_s=cpu_at(usage.cpu_series, record.time_s - usage.started_s) - ready_cpu_s,
            reward=record.values["reward"],
        )
        for record in policy_steps(records)
    )


def policy_steps(records: Sequence[MetricRecord]) -> list[MetricRecord]:
    """Return the record of each step by the first policy replica, in order."""
    found = {r.step: r for r in records if r.role == "policy" and "reward" in r.values}
    return [found[step] for step in sorted(found)]


def clock_start(records: Sequence[MetricRecord]) -> float:
    """Return when the first rollout replica began: its first report covers the time since then."""
    first = min(r.time_s for r in records if r.role == "rollout" and "idle_share" in r.values)
    return first - ROLLOUT_REPORT_S


def cosmos_shares(report: Mapping[str, Any], records: Sequence[MetricRecord]) -> dict[str, float]:
    """Return where time went: idle shares between the start of the clock and the last step."""
    start, steps = clock_start(records), policy_steps(records)
    training_s = sum(r.values["train_s"] for r in steps)
    rollout = [r for r in records if r.role == "rollout" and "idle_share" in r.values]
    in_clock = [r.values["idle_share"] for r in rollout if start < r.time_s < steps[-1].time_s]
    stalls = sorted(r.values["stall_s"] for r in records if "stall_s" in r.values)
    return {
        "policy_idle": 1 - training_s / (steps[-1].time_s - start),
        "rollout_idle": sum(in_clock) / max(1, len(in_clock)),
        "staleness_mean": float(report["staleness"][0]),
        "staleness_max": float(report["staleness"][1]),
        "stall_ms": 1e3 * stalls[len(stalls) // 2],
        "stall_p99_ms": 1e3 * stalls[int(0.99 * (len(stalls) - 1))],
        "publish_ms": float(report["publish_ms"][0]),
        "served_s": float(report["served_s"][0]),
    }


def _accuracy(model_dir: Path, workload: Workload, shared: Shared) -> float:
    tokenizer = AutoTokenizer.from_pretrained(workload.model)
    model = AutoModelForCausalLM.from_pretrained(model_dir)
    rows = read_rows(workload.held_out)
    return greedy_accuracy(model, tokenizer, rows, shared.max_new_tokens)


def run_trl(arm: str, repeat: int, shared: Shared, workload: Workload, out: Path) -> ArmResult:
    """Run the baseline in its own environment; the arm is ``trl`` or ``trl-2`` (threads)."""
    threads = int(arm.partition("-")[2] or 1)
    settings = {
        "steps": shared.steps,
        "prompts": shared.prompts,
        "samples": shared.samples,
        "lr": shared.lr,
        "beta2": shared.beta2,
        "ramp_steps": shared.ramp_steps,
        "max_grad_norm": shared.max_grad_norm,
        "max_new_tokens": shared.max_new_tokens,
        "micro_batch": shared.trl_micro_batch,
        "seed": repeat,
        "threads": threads,
    }
    output = out / "trl.json"
    script = [str(trl_python()), str(HERE / "trl_arm.py"), str(workload.model.parent), str(output)]
    usage = measure(
        [*script, "--settings", json.dumps(settings)],
        environment={**QUIET, "OMP_NUM_THREADS": str(threads), "PYTHONPATH": ""},
        log=out / "log.txt",
        deadline_s=shared.deadline_s,
    )
    found = json.loads(output.read_text())
    return _finish(
        usage,
        arm=arm,
        repeat=repeat,
        setup_s=found["setup_s"],
        points=tuple(Point(**step) for step in found["steps"]),
        accuracies=tuple((a["step"], a["accuracy"]) for a in found["accuracies"]),
        shares={},
    )


def run_arm(arm: str, repeat: int, shared: Shared, workload: Workload, out: Path) -> ArmResult:
    """Run one arm once."""
    run = run_cosmos if arm in COSMOS_ARMS else run_trl
    return run(arm, repeat, shared, workload, out)


def write_results(path: Path, shared: Shared, results: Sequence[ArmResult]) -> None:
    """Write every number as JSON."""
    document = {"shared": asdict(shared), "arms": [asdict(result) for result in results]}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document))


def read_results(path: Path) -> tuple[Shared, list[ArmResult]]:
    """Read what ``write_results`` wrote."""
    found = json.loads(path.read_text())
    arms = [
        ArmResult(
            **{
                **arm,
                "points": tuple(Point(**point) for point in arm["points"]),
                "accuracies": tuple((step, value) for step, value in arm["accuracies"]),
            }
        )
        for arm in found["arms"]
    ]
    shared = {**found["shared"], "targets": tuple(found["shared"]["targets"])}
    return Shared(**shared), arms
