"""The RL benchmark's numbers as Markdown tables and one picture."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from curves import (
    Point,
    first_at,
    median_and_range,
    samples_per_second,
    smoothed_rewards,
    step_seconds,
)
from rl_arms import ArmResult, Shared


def rl_markdown(shared: Shared, results: Sequence[ArmResult]) -> str:
    """Return three tables: speed and idle time, time to reward, resources."""
    arms = list(dict.fromkeys(result.arm for result in results))
    by_arm = {arm: [r for r in results if r.arm == arm] for arm in arms}
    parts = [
        _table(
            (
                *("arm", "samples/s", "s per step", "policy idle", "rollout idle", "staleness"),
                *("at most", "stall", "stall p99", "publication, ms", "served after, s"),
            ),
            [_speed_row(arm, shared, by_arm[arm]) for arm in arms],
        ),
        _table(
            ("arm", *(f"{unit} to {t}" for unit in _UNITS for t in shared.targets)),
            [_reward_row(arm, shared.targets, by_arm[arm]) for arm in arms],
        ),
        _table(
            ("arm", "held-out accuracy", "start-up s", "peak RSS MiB", "peak PSS MiB", "others"),
            [_resource_row(arm, by_arm[arm]) for arm in arms],
        ),
    ]
    return "\n\n".join(parts)


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _over(results: Sequence[ArmResult], of: Callable[[ArmResult], float], digits: int = 1) -> str:
    return median_and_range([of(result) for result in results], digits)


def _share(results: Sequence[ArmResult], name: str, digits: int = 2) -> str:
    return median_and_range([r.shares[name] for r in results if name in r.shares], digits)


def _speed_row(arm: str, shared: Shared, results: Sequence[ArmResult]) -> list[str]:
    per_step = shared.prompts * shared.samples
    return [
        arm,
        _over(results, lambda r: samples_per_second(r.points, per_step), 0),
        _over(results, lambda r: step_seconds(r.points), 2),
        _share(results, "policy_idle"),
        _share(results, "rollout_idle"),
        _share(results, "staleness_mean"),
        _share(results, "staleness_max", 0),
        _share(results, "stall_ms", 1),
        _share(results, "stall_p99_ms", 1),
        _share(results, "publish_ms", 1),
        _share(results, "served_s"),
    ]


def _reward_row(arm: str, targets: Sequence[float], results: Sequence[ArmResult]) -> list[str]:
    return [
        arm,
        *(_reached(results, target, of) for of in _UNITS.values() for target in targets),
    ]


_UNITS: Mapping[str, Callable[[ArmResult, Point], float]] = {
    "s": lambda _, point: point.seconds,
    "s from the start": lambda result, point: result.setup_s + point.seconds,
    "CPU s": lambda _, point: point.cpu_s,
}


def _reached(
    results: Sequence[ArmResult], target: float, of: Callable[[ArmResult, Point], float]
) -> str:
    """Return the median over the repeats that reached the target, and how many did not."""
    found = [(result, first_at(result.points, target)) for result in results]
    reached = [of(result, point) for result, point in found if point is not None]
    missed = len(found) - len(reached)
    text = median_and_range(reached, 0)
    return f"{text}, {missed} of {len(found)} never" if missed else text


def _resource_row(arm: str, results: Sequence[ArmResult]) -> list[str]:
    return [
        arm,
        _over(results, lambda r: r.accuracies[-1][1], 3),
        _over(results, lambda r: r.setup_s, 0),
        _over(results, lambda r: r.peak_rss_mib, 0),
        _over(results, lambda r: r.peak_pss_mib, 0),
        _over(results, lambda r: r.others_cpus, 2),
    ]


def draw_curves(results: Sequence[ArmResult], path: Path) -> None:
    """Draw smoothed reward against wall clock and against CPU seconds, one line per run."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    colours = {a: f"C{i}" for i, a in enumerate(dict.fromkeys(r.arm for r in results))}
    for result in results:
        rewards = smoothed_rewards(result.points)
        points = result.points[-len(rewards) :]
        label = result.arm if result.repeat == 0 else None
        for panel, xs in zip(
            panels, ([p.seconds for p in points], [p.cpu_s for p in points]), strict=True
        ):
            panel.plot(xs, rewards, color=colours[result.arm], label=label, linewidth=1)
    for panel, name in zip(panels, ("seconds", "CPU seconds, all processes"), strict=True):
        panel.set(xlabel=name)
        panel.grid(alpha=0.3)
    panels[0].set(ylabel="training reward, mean of 10 steps")
    panels[0].legend()
    figure.savefig(path, dpi=110)
