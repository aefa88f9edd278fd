"""Learning curves and what is read from them, the same for every system; pure functions."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

SMOOTHING_STEPS = 10
RAMP_STEPS = 10


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """One optimizer step.

    Attributes:
        step: from 0.
        seconds: when it ended, since the arm's clock started.
        cpu_s: CPU seconds until then.
        reward: mean over its samples.
    """

    step: int
    seconds: float
    cpu_s: float
    reward: float


def smoothed_rewards(points: Sequence[Point], width: int = SMOOTHING_STEPS) -> list[float]:
    """Return trailing means of ``width`` steps, one for each step from ``width - 1`` on."""
    rewards = [point.reward for point in points]
    return [sum(rewards[i - width : i]) / width for i in range(width, len(rewards) + 1)]


def first_at(points: Sequence[Point], target: float) -> Point | None:
    """Return the first step whose smoothed reward is at least ``target``; None if there is none."""
    for offset, reward in enumerate(smoothed_rewards(points)):
        if reward >= target:
            return points[offset + SMOOTHING_STEPS - 1]
    return None


def samples_per_second(points: Sequence[Point], samples_per_step: int) -> float:
    """Return the rate after the first steps, which fill caches and queues."""
    ramp = min(RAMP_STEPS, len(points) // 2)
    first, last = points[ramp], points[-1]
    return (last.step - first.step) * samples_per_step / (last.seconds - first.seconds)


def step_seconds(points: Sequence[Point]) -> float:
    """Return the median time from the end of one step to the end of the next."""
    return median(b.seconds - a.seconds for a, b in itertools.pairwise(points))


def median_and_range(values: Sequence[float], digits: int = 1) -> str:
    """Return ``median (lowest-highest)``; a dash without values."""
    if not values:
        return "-"
    middle = f"{median(values):.{digits}f}"
    if len(values) == 1:
        return middle
    return f"{middle} ({min(values):.{digits}f}-{max(values):.{digits}f})"
