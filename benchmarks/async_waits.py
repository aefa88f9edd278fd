"""What samples of the bubble benchmark wait for outside of the engine: environment and rewards."""

import asyncio
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

from cosmos_core.messages import GroupId
from cosmos_core.simulation import Activity, SystemConfig
from cosmos_rollout.environments import Chat
from cosmos_rollout.environments.environment import opening
from cosmos_rollout.prompts import PromptRow
from cosmos_rollout.siblings import group_seed

_MOST_PROMPTS = 4096


class Waits:
    """When samples waited for something; the environment goes before rewards.

    Samples enter and leave in one thread, and another may divide its time by them.
    """

    def __init__(self) -> None:
        self._counts: dict[Activity, int] = {"env_wait": 0, "reward_wait": 0}
        self._changes: list[tuple[float, Activity]] = [(0.0, "idle_no_work")]

    @contextmanager
    def during(self, activity: Activity) -> Generator[None]:
        """Say that a sample waits for this."""
        self.count(activity, 1, time.monotonic())
        try:
            yield
        finally:
            self.count(activity, -1, time.monotonic())

    def count(self, activity: Activity, change: int, now: float) -> None:
        """Say that so many samples more wait for this from now on."""
        self._counts[activity] += change
        waited: list[Activity] = [each for each, count in self._counts.items() if count]
        present = waited[0] if waited else "idle_no_work"
        if present != self._changes[-1][1]:
            self._changes.append((now, present))

    def split(self, start_s: float, end_s: float) -> Iterator[tuple[Activity, float]]:
        """Divide idle time by what was waited for, if anything; forget what lies before its end."""
        found = len(self._changes)
        changes = self._changes[:found]
        del self._changes[: found - 1]
        changes.append((end_s, "idle_no_work"))
        for (begun_s, activity), (done_s, _) in pairwise(changes):
            if max(begun_s, start_s) < min(done_s, end_s):
                yield activity, min(done_s, end_s)


class TimedScorer:
    """The reward pool, with the time that scores take among what is waited for."""

    def __init__(self, pool: Any, waits: Waits) -> None:
        self._pool = pool
        self._waits = waits

    async def score(self, sample: Any) -> Any:
        """Score a sample as the pool does."""
        with self._waits.during("reward_wait"):
            return await self._pool.score(sample)

    async def score_group(self, samples: Any, outcomes: Any) -> Any:
        """Add what depends on the whole group, as the pool does."""
        return await self._pool.score_group(samples, outcomes)


class SlowEnvironment:
    """An `Environment` that takes its time to answer the first turn, and listens to a second one.

    Args:
        system: how long it takes.
        run_seed: of the recipe, from which the seeds of groups follow.
        waits: of what samples wait for.
    """

    def __init__(self, system: SystemConfig, run_seed: int, waits: Waits) -> None:
        self._system = system
        self._waits = waits
        groups = (GroupId("train", 0, ordinal) for ordinal in range(_MOST_PROMPTS))
        self._ordinals = {group_seed(run_seed, group): group.ordinal for group in groups}

    @property
    def tools(self) -> Sequence[Mapping[str, object]]:
        """There are none."""
        return ()

    async def play(self, row: PromptRow, chat: Chat, seed: int) -> Mapping[str, float]:
        """Listen, take the time of an answer, and listen again."""
        first = await chat.reply(opening(row))
        with self._waits.during("env_wait"):
            num_tokens = len(first.text) + 1  # a token is a character, the last one the end
            await asyncio.sleep(self._system.answer_s(self._ordinals[seed], num_tokens))
        await chat.reply([{"role": "user", "content": "go on"}])
        return {}

    async def aclose(self) -> None:
        """There is nothing to let go of."""
