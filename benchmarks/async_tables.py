"""What the bubble benchmark shows: tables with the simulation beside the run, and a timeline."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from async_arms import DEFAULT, SYNC, SYNC_COLOCATED

from cosmos_core.simulation import Capacity, Figures, LogRecord, Span, StepTaken

COLOURS = {
    "decode": "#4c78a8",
    "fwd_bwd": "#54a24b",
    "optim": "#54a24b",
    "push_exposed": "#e45756",
    "paused_for_weights": "#e45756",
    "swap": "#e45756",
    "checkpoint": "#9d755d",
    "eval": "#b279a2",
    "wait_data": "#f2e9dc",
    "gated_staleness": "#f2e9dc",
    "idle_no_work": "#bab0ac",
    "env_wait": "#eeca3b",
    "reward_wait": "#eeca3b",
}
_SHOWN_S = 6.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """One run of an arm and its simulation.

    Attributes:
        arm: its name.
        seed: of its lengths.
        bound_s: least seconds of a step.
        real: figures of the run.
        predicted: figures of its simulation.
    """

    arm: str
    seed: int
    bound_s: float
    real: Figures
    predicted: Figures

    @property
    def line(self) -> str:
        """The run in one line."""
        real, said = self.real, self.predicted
        return (
            f"{self.arm}, seed {self.seed}: {real.steps} steps of {real.step_s:.3f} s (simulated "
            f"{said.step_s:.3f}), T/bound {real.step_s / self.bound_s:.3f} "
            f"({said.step_s / self.bound_s:.3f}), idle policy {real.policy_idle:.1%} "
            f"({said.policy_idle:.1%}) rollout {real.rollout_idle_tokens:.1%} "
            f"({said.rollout_idle_tokens:.1%}), swap {real.swap_ms.p50:.1f} to "
            f"{real.swap_ms.max:.1f} ms, push {real.push_policy_ms:.1f} ms, staleness "
            f"{real.staleness_first.max:.0f}, ratio {real.length_ratio:.3f}"
        )


Value = Callable[[Result, Figures], float]


def _cell(results: Sequence[Result], value: Value, form: Callable[[float], str]) -> str:
    """Return the median of the runs, their range, and the median of the simulations."""
    found = [value(result, result.real) for result in results]
    said = statistics.median(value(result, result.predicted) for result in results)
    middle, low, high = (form(f(found)) for f in (statistics.median, min, max))
    span = f" ({low} to {high})" if low != high else ""
    return f"{middle}{span} · {form(said)}"


def _percent(value: float) -> str:
    return f"{100 * value:.1f} %"


def _fixed(digits: int) -> Callable[[float], str]:
    return lambda value: f"{value:.{digits}f}"


def _speed_up(baseline: Sequence[Result]) -> Value:
    """Return how much sooner a step is than the baseline's, simulated ones than simulated ones."""
    real = statistics.median(result.real.step_s for result in baseline)
    predicted = statistics.median(result.predicted.step_s for result in baseline)
    return lambda r, f: (real if f is r.real else predicted) / f.step_s


def _columns(
    baselines: Mapping[str, Sequence[Result]],
) -> list[tuple[str, Value, Callable[[float], str]]]:
    columns: list[tuple[str, Value, Callable[[float], str]]] = [
        ("steps/h", lambda r, f: f.steps_per_hour, _fixed(0)),
        ("T/bound", lambda r, f: f.step_s / r.bound_s, _fixed(2)),
    ]
    for name, baseline in baselines.items():
        columns.append((f"x {name}", _speed_up(baseline), _fixed(2)))
    return [
        *columns,
        ("policy idle", lambda r, f: f.policy_idle, _percent),
        ("rollout idle, tokens", lambda r, f: f.rollout_idle_tokens, _percent),
        ("rollout idle, slots", lambda r, f: f.rollout_idle_slots, _percent),
    ]


def _detail() -> list[tuple[str, Value, Callable[[float], str]]]:
    return [
        ("push, policy ms/step", lambda r, f: f.push_policy_ms, _fixed(1)),
        ("push, rollout ms/step", lambda r, f: f.push_rollout_ms, _fixed(1)),
        ("swap p50 ms", lambda r, f: f.swap_ms.p50, _fixed(1)),
        ("swap p99 ms", lambda r, f: f.swap_ms.p99, _fixed(1)),
        ("staleness, first token p50", lambda r, f: f.staleness_first.p50, _fixed(0)),
        ("p99", lambda r, f: f.staleness_first.p99, _fixed(0)),
        ("max", lambda r, f: f.staleness_first.max, _fixed(0)),
        ("last token p50", lambda r, f: f.staleness_last.p50, _fixed(0)),
        ("p99 ", lambda r, f: f.staleness_last.p99, _fixed(0)),
        ("max ", lambda r, f: f.staleness_last.max, _fixed(0)),
        ("trained/generated length", lambda r, f: f.length_ratio, _fixed(3)),
        ("dropped", lambda r, f: f.dropped, _percent),
        ("slots denied", lambda r, f: f.denied, _fixed(1)),
        ("engine empty, held back", lambda r, f: f.withheld, _percent),
        ("engine empty, work on its way", lambda r, f: f.no_work, _percent),
    ]


def _table(
    by_arm: Mapping[str, Sequence[Result]],
    columns: Sequence[tuple[str, Value, Callable[[float], str]]],
) -> str:
    lines = ["| arm | " + " | ".join(name for name, _, _ in columns) + " |"]
    lines.append("|---" * (1 + len(columns)) + "|")
    for arm, results in by_arm.items():
        cells = [_cell(results, value, form) for _, value, form in columns]
        lines.append(f"| {arm} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def bubble_markdown(results: Sequence[Result]) -> str:
    """Return the tables: median (lowest to highest) of the runs, then what was simulated."""
    by_arm: dict[str, list[Result]] = {}
    for result in results:
        by_arm.setdefault(result.arm, []).append(result)
    columns = _columns({name: by_arm[name] for name in (SYNC_COLOCATED, SYNC) if name in by_arm})
    if any(result.predicted.environment_wait for result in results):
        columns.append(("waits for the environment", lambda r, f: f.environment_wait, _percent))
    parts = [_table(by_arm, columns), _table(by_arm, _detail())]
    if DEFAULT in by_arm:
        parts.append(_goals(by_arm[DEFAULT]))
    parts.append(_simulated_beside_real(by_arm))
    return "\n\n".join(parts)


@dataclass(frozen=True, kw_only=True, slots=True)
class Goal:
    """What was to be reached on the default policy.

    Attributes:
        name: in the table.
        most: the largest value that reaches it.
        of: its value by the figures of a run, or those of its simulation.
        form: how values are written.
    """

    name: str
    most: float
    of: Value
    form: Callable[[float], str]


GOALS = (
    Goal(
        name="policy idle at most 5 %",
        most=0.05,
        of=lambda r, f: f.policy_idle,
        form=_percent,
    ),
    Goal(
        name="rollout idle, tokens, at most 5 %",
        most=0.05,
        of=lambda r, f: f.rollout_idle_tokens,
        form=_percent,
    ),
    Goal(
        name="rollout idle, slots, at most 5 %",
        most=0.05,
        of=lambda r, f: f.rollout_idle_slots,
        form=_percent,
    ),
    Goal(
        name="T/bound at most 1.10",
        most=1.1,
        of=lambda r, f: f.step_s / r.bound_s,
        form=_fixed(3),
    ),
    Goal(
        name="swap p99 at most 100 ms",
        most=100.0,
        of=lambda r, f: f.swap_ms.p99,
        form=_fixed(1),
    ),
    Goal(
        name="staleness at most 4",
        most=4.0,
        of=lambda r, f: f.staleness_first.max,
        form=_fixed(0),
    ),
    Goal(
        name="trained/generated length off 1 by at most 0.02",
        most=0.02,
        of=lambda r, f: abs(f.length_ratio - 1),
        form=_fixed(3),
    ),
)
SIMULATED = (
    Goal(
        name="simulated step within 10 %",
        most=0.1,
        of=lambda r, _: abs(r.predicted.step_s / r.real.step_s - 1),
        form=_percent,
    ),
    Goal(
        name="simulated policy idle within 1 point",
        most=0.01,
        of=lambda r, _: abs(r.predicted.policy_idle - r.real.policy_idle),
        form=_percent,
    ),
    Goal(
        name="simulated rollout idle, tokens, within 1 point",
        most=0.01,
        of=lambda r, _: abs(r.predicted.rollout_idle_tokens - r.real.rollout_idle_tokens),
        form=_percent,
    ),
    Goal(
        name="simulated rollout idle, slots, within 1 point",
        most=0.01,
        of=lambda r, _: abs(r.predicted.rollout_idle_slots - r.real.rollout_idle_slots),
        form=_percent,
    ),
)
"""What is asked of the simulator, which has nothing beside it."""


def _goals(results: Sequence[Result]) -> str:
    """Return what was to be reached on the default policy beside the median, and the worst run."""
    lines = ["| goal | median | worst | simulated |", "|---|---|---|---|"]
    for goal in (*GOALS, *SIMULATED):
        values = [goal.of(result, result.real) for result in results]
        middle, worst = goal.form(statistics.median(values)), goal.form(max(values))
        said = statistics.median(goal.of(result, result.predicted) for result in results)
        simulated = goal.form(said) if goal in GOALS else "-"
        lines.append(f"| {goal.name} | {middle} | {worst} | {simulated} |")
    return "\n".join(lines)


def missed_goals(results: Sequence[Result]) -> list[str]:
    """Return the names of goals that the median of the runs of the default policy misses."""
    of_default = [result for result in results if result.arm == DEFAULT]
    return [
        goal.name
        for goal in (*GOALS, *SIMULATED)
        if of_default and statistics.median(goal.of(r, r.real) for r in of_default) > goal.most
    ]


_SHARES: Mapping[str, Callable[[Figures], float]] = {
    "policy idle": lambda f: f.policy_idle,
    "rollout idle, tokens": lambda f: f.rollout_idle_tokens,
    "rollout idle, slots": lambda f: f.rollout_idle_slots,
}


def _simulated_beside_real(by_arm: Mapping[str, Sequence[Result]]) -> str:
    """Return how far the simulator's medians are from those of the runs, by arm."""

    def medians(results: Sequence[Result], of: Callable[[Figures], float]) -> tuple[float, float]:
        real = statistics.median(of(result.real) for result in results)
        return real, statistics.median(of(result.predicted) for result in results)

    def points(results: Sequence[Result], of: Callable[[Figures], float]) -> str:
        real, predicted = medians(results, of)
        return f"{100 * (predicted - real):+.1f}"

    head = ("simulated beside real", "step", *(f"{name}, points" for name in _SHARES))
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for arm, results in by_arm.items():
        real_s, predicted_s = medians(results, lambda f: f.step_s)
        step = _percent(abs(predicted_s / real_s - 1))
        shares = [points(results, of) for of in _SHARES.values()]
        lines.append("| " + " | ".join((arm, step, *shares)) + " |")
    return "\n".join(lines)


def draw_timelines(logs: Mapping[str, tuple[Capacity, Sequence[LogRecord]]], path: Path) -> None:
    """Draw what every replica of every arm did in some seconds in the middle of its run."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib.figure import Figure

    rows = sum(1 + capacity.rollouts for capacity, _ in logs.values())
    figure = Figure(figsize=(10, 1 + 0.22 * rows + 0.3 * len(logs)), layout="constrained")
    shares = [1 + capacity.rollouts for capacity, _ in logs.values()]
    axes = figure.subplots(len(logs), 1, sharex=True, squeeze=False, height_ratios=shares)
    for (name, (capacity, log)), place in zip(logs.items(), axes[:, 0], strict=True):
        ends = sorted(record.end_s for record in log if isinstance(record, StepTaken))
        begin = max(ends[0], ends[-1] - _SHOWN_S)
        spans = [
            r
            for r in log
            if isinstance(r, Span) and r.end_s > begin and r.start_s < begin + _SHOWN_S
        ]
        replicas = sorted({span.replica for span in spans}, reverse=True)
        for span in spans:
            full = span.width / capacity.max_running if span.activity == "decode" else 1.0
            start_s, end_s = max(begin, span.start_s), min(begin + _SHOWN_S, span.end_s)
            place.barh(
                replicas.index(span.replica),
                end_s - start_s,
                left=start_s - begin,
                height=0.9 * full,
                color=COLOURS.get(span.activity, "#888888"),
            )
        place.set_yticks(range(len(replicas)), replicas, fontsize=6)
        place.set_title(name, fontsize=8, loc="left", pad=2)
    axes[-1, 0].set(xlabel="seconds", xlim=(0, _SHOWN_S))
    figure.suptitle(
        "blue: decoding, as high as the batch is full; green: training; red: standing still for "
        "weights;\npale: nothing to train on, or held back by staleness; grey: work on its way; "
        "yellow: environment, rewards",
        fontsize=8,
    )
    figure.savefig(path, dpi=110)
