"""Rewards in worker processes: a reward that raises, hangs or dies costs one sample its reward."""

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from typing import TypeVar

from pebble import ProcessExpired

from cosmos_rollout.errors import RewardCodeError, RewardError, RewardPoolClosedError
from cosmos_rollout.lasting_pool import LastingPool, UnsendableError
from cosmos_rollout.one_loop import OneLoop
from cosmos_rollout.prompts import data_set_of
from cosmos_rollout.rewards.answers import MathReward
from cosmos_rollout.rewards.batching import Batcher
from cosmos_rollout.rewards.builtin import BoxedMathReward, ExactReward
from cosmos_rollout.rewards.group import GroupReward
from cosmos_rollout.rewards.kinds import RewardConfig
from cosmos_rollout.rewards.scoring import Failure, Outcome, RewardInput, Scored
from cosmos_rollout.rewards.service import ServiceReward
from cosmos_rollout.rewards.worker import (
    prepare,
    score,
    score_all,
    score_group,
)

T = TypeVar("T")
_Values = Sequence[float | Failure]
"""One sample's rewards, in the order of the configuration."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardPoolConfig:
    """Which rewards a sample gets, and what their workers may use.

    Attributes:
        rewards: their values, times their weights, add up to a sample's reward.
        group_rewards: likewise, of all siblings together, once the last is generated.
        sets: by name of a reward, the data sets whose rows it judges; others judge all rows.
        num_workers: processes that compute rewards.
        timeout_s: a reward that takes longer is killed, and the sample has failed.
        memory_mib: data memory of a worker; an allocation beyond it fails. 0: no limit.
        start_timeout_s: how long importing the rewards may take.
    """

    rewards: tuple[RewardConfig, ...] = (ExactReward(),)
    group_rewards: tuple[GroupReward, ...] = ()
    sets: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    num_workers: int = 1
    timeout_s: float = 10.0
    memory_mib: int = 4096
    start_timeout_s: float = 120.0

    def __post_init__(self) -> None:
        _check_settings((*self.rewards, *self.group_rewards))
        names = Counter(reward.name for reward in (*self.rewards, *self.group_rewards))
        twice = [name for name, n in names.items() if n > 1]
        if not self.rewards or twice:
            raise ValueError(f"rewards need distinct names, at least one; twice: {twice}")
        vague = [
            r.name for r in (*self.rewards, *self.group_rewards) if not math.isfinite(r.weight)
        ]
        if vague:
            raise ValueError(f"the weight of a reward has to be finite; it is not of: {vague}")
        unknown = sorted(self.sets.keys() - names.keys())
        if unknown:
            raise ValueError(
                f"sets names the reward {unknown[0]!r}; rewards are called: {', '.join(names)}"
            )
        limits_s = (self.timeout_s, self.start_timeout_s)
        if self.num_workers < 1 or not all(0.0 < limit_s < math.inf for limit_s in limits_s):
            raise ValueError(
                "num_workers, timeout_s and start_timeout_s have to be positive and finite"
            )
        for reward in self.rewards:
            if isinstance(reward, ServiceReward) and reward.timeout_s >= self.timeout_s:
                raise ValueError(
                    f"timeout_s of reward {reward.name} is {reward.timeout_s:g}, and that of all "
                    f"rewards {self.timeout_s:g}, which ends a worker: set that one higher"
                )
        if self.memory_mib < 0:
            raise ValueError(f"memory_mib has to be 0 or more, found {self.memory_mib}")

    def judges(self, reward: str, data_set: str) -> bool:
        """Whether a reward judges the rows of a data set."""
        return reward not in self.sets or data_set in self.sets[reward]

    def build(self) -> "RewardPool":
        """Make the pool; `RewardPool.start` starts its processes."""
        return RewardPool(self)


class RewardPool:
    """Scores samples in worker processes that are replaced when they hang or die.

    Used from one event loop at a time: another one may follow when that has ended.

    Quick rewards are computed for several samples in one hand-over. If a worker hangs or dies over
    such a batch, its samples are scored again one by one, so that only the culprit fails.
    """

    def __init__(self, config: RewardPoolConfig) -> None:
        self._config = config
        self._workers = LastingPool(
            config.num_workers,
            memory_mib=config.memory_mib,
            preload=_preload(config.rewards),
            start_s=config.start_timeout_s,
        )
        self._batcher = Batcher(self._score_batch, num_lanes=config.num_workers)
        self._failures: Counter[str] = Counter()
        self._num_scored = 0
        self._closed = False
        self._loop = OneLoop("this pool of rewards")
        self._due_of: dict[str, tuple[RewardConfig, ...]] = {}

    @property
    def num_scored(self) -> int:
        """Samples that got all their rewards."""
        return self._num_scored

    @property
    def failures(self) -> dict[str, int]:
        """Failed samples by reward and class of failure, as in ``{"exact: TimeoutError": 2}``."""
        return dict(self._failures)

    async def start(self) -> None:
        """Start the workers and import every reward.

        Raises:
            RewardCodeError: if one of them cannot be imported or called.
            RewardError: if a worker did not get there.
            RewardPoolClosedError: after `aclose`.
        """
        self._refuse_if_closed()
        for config in (*self._config.rewards, *self._config.group_rewards):
            refused = f"reward {config.name} cannot be used: "
            try:
                problem = await self._workers.run(prepare, (config,), self._config.start_timeout_s)
                if problem:
                    raise RewardCodeError(f"{refused}{problem}")
                continue
            except TimeoutError:
                problem = f"importing it took more than {self._config.start_timeout_s} s"
            except ProcessExpired as error:
                problem = f"importing it ended the process (exit code {error.exitcode})"
            except BrokenProcessPool as error:
                problem = str(error)
            raise RewardError(f"{refused}{problem}")

    async def score(self, sample: RewardInput) -> Outcome:
        """Compute every reward of one sample; the first failure, in order, is the outcome.

        Raises:
            RewardPoolClosedError: after `aclose`.
            WrongLoopError: while another event loop, in another thread, uses the pool.
        """
        self._refuse_if_closed()
        values = await self._batcher.call(sample)
        rewards: dict[str, float] = {}
        total = 0.0
        for config, value in zip(self._due(sample), values, strict=True):
            if isinstance(value, Failure):
                self._failures[f"{value.reward}: {value.error}"] += 1
                return value
            rewards[config.name] = value
            total += config.weight * value
        self._num_scored += 1
        return Scored(rewards=rewards, total=total)

    async def score_group(
        self, samples: Sequence[RewardInput], outcomes: Sequence[Outcome]
    ) -> Sequence[Outcome]:
        """Add the group rewards to the siblings' own; a sibling that failed takes no part.

        Raises:
            RewardPoolClosedError: after `aclose`.
        """
        self._refuse_if_closed()
        joined = list(outcomes)
        name = data_set_of(samples[0].fields) if samples else ""
        for config in self._config.group_rewards:
            if not self._config.judges(config.name, name):
                continue
            places = [i for i, outcome in enumerate(joined) if isinstance(outcome, Scored)]
            if not places:
                break
            values = await self._group_values(config, [samples[i] for i in places])
            for place, value in zip(places, values, strict=True):
                joined[place] = self._add(config, joined[place], value)
        return joined

    async def aclose(self) -> None:
        """Drop what is pending and end the workers. Idempotent."""
        self._closed = True
        await self._batcher.aclose()
        await self._workers.aclose()

    def _refuse_if_closed(self) -> None:
        self._loop.check_if_runs()
        if self._closed:
            raise RewardPoolClosedError("this pool of rewards was closed; make another")

    async def _score_batch(self, samples: Sequence[RewardInput]) -> Sequence[_Values]:
        """Compute every reward of every sample in one hand-over."""
        due = [self._due(sample) for sample in samples]
        if len(samples) > 1:
            try:
                return await self._workers.run(
                    score_all, (due, tuple(samples)), self._config.timeout_s
                )
            except (TimeoutError, ProcessExpired, BrokenProcessPool, UnsendableError):
                pass  # one of them hangs, kills or cannot be sent; found out below
        return [
            await asyncio.gather(*(self._score_one(config, sample) for config in rewards))
            for sample, rewards in zip(samples, due, strict=True)
        ]

    def _due(self, sample: RewardInput) -> tuple[RewardConfig, ...]:
        """Return the rewards that judge a sample; always one tuple, which pickles once."""
        if not self._config.sets:
            return self._config.rewards
        name = data_set_of(sample.fields)
        if name not in self._due_of:
            self._due_of[name] = tuple(
                config for config in self._config.rewards if self._config.judges(config.name, name)
            )
        return self._due_of[name]

    async def _score_one(self, config: RewardConfig, sample: RewardInput) -> float | Failure:
        return await self._guard(config.name, score, (config, sample))

    async def _group_values(
        self, config: GroupReward, samples: Sequence[RewardInput]
    ) -> Sequence[float | Failure]:
        values = await self._guard(config.name, score_group, (config, tuple(samples)))
        return [values] * len(samples) if isinstance(values, Failure) else values

    async def _guard(
        self, reward: str, function: Callable[..., T], arguments: tuple[object, ...]
    ) -> T | Failure:
        """Have a worker compute something; a `Failure` if it was too slow or died."""
        try:
            return await self._workers.run(function, arguments, self._config.timeout_s)
        except TimeoutError:
            words = f"no result within {self._config.timeout_s} s"
            return Failure(reward=reward, error="TimeoutError", message=words)
        except ProcessExpired as error:
            words = f"the worker process died (exit code {error.exitcode})"
            return Failure(reward=reward, error="ProcessDied", message=words)
        except BrokenProcessPool as error:
            return Failure(reward=reward, error="ProcessDied", message=str(error))
        except UnsendableError as error:
            words = f"the sample cannot be pickled, which takes it to a worker process: {error}"
            return Failure(reward=reward, error="PicklingError", message=words)

    def _add(self, config: GroupReward, outcome: Outcome, value: float | Failure) -> Outcome:
        if isinstance(outcome, Failure):
            return outcome
        if isinstance(value, Failure):
            self._failures[f"{value.reward}: {value.error}"] += 1
            self._num_scored -= 1
            return value
        return Scored(
            rewards={**outcome.rewards, config.name: value},
            total=outcome.total + config.weight * value,
        )


def _check_settings(rewards: Sequence[object]) -> None:
    for reward in rewards:
        if not hasattr(reward, "build"):
            raise ValueError(
                "rewards are settings, such as ExactReward() or, for a function of yours, "
                f'PythonReward(function="my_rewards.py:name"); found {reward!r}'
            )


def _preload(rewards: Sequence[RewardConfig]) -> list[str]:
    modules = ["cosmos_rollout.rewards.worker"]
    if any(isinstance(reward, BoxedMathReward | MathReward) for reward in rewards):
        modules.append("math_verify")
    return modules
