"""Rewards of validation samples, asked for one by one: what fails costs its own sample only.

pixels, prompt ─► SampleScorer ─► future of SampleRewards ─► gallery, figures
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from jaxtyping import Float
from torch import Tensor

from cosmos_wfm.scoring import GuardedScorer, Scores

REWARD = "validation/reward"
"""Name of the mean of what samples earned; of a part of it, the same with ``/NAME``."""
FAILED = "validation/failed"


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleRewards:
    """What one sample earned.

    Attributes:
        rewards: by name, without those that mean nothing for the prompt, and those that failed.
        reward: what a run would train on; ``None`` unless every one of them is there.
        problems: why rewards failed, a line each.
    """

    rewards: Mapping[str, float] = field(default_factory=dict[str, float])
    reward: float | None = None
    problems: tuple[str, ...] = ()


SampleScorer = Callable[[Float[Tensor, "3 *F H W"], str], "Future[SampleRewards]"]
"""From the pixels of one sample in [-1, 1] and its prompt to its rewards, now or later.

The future has no exception: what fails is among the problems.
"""


def scorer_of_samples(scorer: GuardedScorer) -> SampleScorer:
    """Return what rewards samples by a run's scorer, whose word is ``reward`` alone."""

    def one(pixels: Float[Tensor, "3 *F H W"], prompt: str) -> "Future[SampleRewards]":
        asked: Future[SampleRewards] = Future()
        given = scorer(pixels[None], [prompt], waits=False)

        def answer(done: "Future[Scores]") -> None:
            if not done.cancelled() and asked.set_running_or_notify_cancel():
                asked.set_result(_only(done.result(0.0)))

        given.add_done_callback(answer)
        asked.add_done_callback(lambda done: done.cancelled() and given.cancel())
        return asked

    return one


def ask_for_rewards(
    scorer: SampleScorer, pixels: Float[Tensor, "3 *F H W"], prompt: str
) -> "Future[SampleRewards]":
    """Have a sample rewarded; one that is not finite earns nothing, though 8 bits show it black."""
    if bool(pixels.isfinite().all()):
        return scorer(pixels, prompt)
    failed: Future[SampleRewards] = Future()
    failed.set_result(SampleRewards(problems=("what was drawn is not finite",)))
    return failed


def collect_rewards(
    asked: Sequence[Sequence["Future[SampleRewards]"]], deadline_s: float
) -> list[list[SampleRewards]]:
    """Wait for rewards; those that are not there in time have failed.

    Args:
        asked: a row for each prompt.
        deadline_s: for all of them.
    """
    end = time.monotonic() + deadline_s

    def earned(future: "Future[SampleRewards]") -> SampleRewards:
        try:
            return future.result(max(0.0, end - time.monotonic()))
        except TimeoutError:
            future.cancel()
            return SampleRewards(problems=(f"no rewards in {deadline_s:g} s",))

    return [[earned(future) for future in row] for row in asked]


def reward_figures(found: Sequence[Sequence[SampleRewards]]) -> dict[str, float]:
    """Return the means of the samples that have a reward, of all and by name, and who failed."""
    samples = [sample for row in found for sample in row]
    values: dict[str, list[float]] = {
        REWARD: [sample.reward for sample in samples if sample.reward is not None]
    }
    for sample in samples:
        for name, reward in sample.rewards.items():
            values.setdefault(f"{REWARD}/{name}", []).append(reward)
    means = {name: sum(each) / len(each) for name, each in values.items() if each}
    return {**means, FAILED: float(sum(bool(sample.problems) for sample in samples))}


def _only(scores: Scores) -> SampleRewards:
    [value] = scores.values
    return SampleRewards(reward=None if math.isnan(value) else value, problems=scores.problems)
