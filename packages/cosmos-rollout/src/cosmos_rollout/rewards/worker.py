"""What runs inside a reward worker process: one reward of one sample at a time.

It imports nothing heavy, so that a worker that had to be killed is replaced in milliseconds.
"""

import copy
import inspect
import math
from collections.abc import Sequence
from functools import lru_cache

from cosmos_rollout.errors import RewardError
from cosmos_rollout.rewards.group import GroupReward
from cosmos_rollout.rewards.kinds import RewardConfig
from cosmos_rollout.rewards.passing import may_pass
from cosmos_rollout.rewards.scoring import (
    Failure,
    GroupRewardFunction,
    RewardFunction,
    RewardInput,
)
from cosmos_rollout.user_code import words_of


@lru_cache
def function_of(config: RewardConfig) -> RewardFunction:
    """Build a reward's function, once per worker.

    Raises:
        RewardError: if it cannot be imported, or does not take one sample.
    """
    function = config.build()
    try:
        inspect.signature(function).bind(RewardInput(prompt="", response=""))
    except TypeError as error:
        raise RewardError(
            f"reward {config.name} has to be callable as function(sample: RewardInput): {error}"
        ) from error
    _refuse_async(config.name, function)
    return function


@lru_cache
def group_function_of(config: GroupReward) -> GroupRewardFunction:
    """Build a group reward's function, once per worker.

    Raises:
        RewardError: if it cannot be imported, or does not take a list of samples.
    """
    function = config.build()
    try:
        inspect.signature(function).bind([])
    except TypeError as error:
        raise RewardError(
            f"reward {config.name} has to be callable as "
            f"function(samples: Sequence[RewardInput]): {error}"
        ) from error
    _refuse_async(config.name, function)
    return function


def _refuse_async(name: str, function: object) -> None:
    if inspect.iscoroutinefunction(function):
        raise RewardError(
            f"reward {name} is an async function, and a worker process has no event loop: make it "
            "a plain one; others are computed while it waits if num_workers is larger"
        )


def prepare(config: RewardConfig | GroupReward) -> str:
    """Build the function ahead of the first sample; return what is wrong with it, or nothing."""
    try:
        if isinstance(config, GroupReward):
            group_function_of(config)
        else:
            function_of(config)
    except BaseException as error:  # noqa: BLE001 - a user's module may raise anything, or exit
        return f"{type(error).__name__}: {words_of(error)}"
    return ""


def score(config: RewardConfig, sample: RewardInput) -> float | Failure:
    """Run one reward on one sample; whatever it raises becomes a `Failure`."""
    try:
        value = float(function_of(config)(sample))
    except BaseException as error:  # noqa: BLE001 - costs this sample's reward only
        return _raised(config.name, error)
    return _finite(config.name, value)


def score_group(config: GroupReward, samples: Sequence[RewardInput]) -> list[float | Failure]:
    """Run a group reward; whatever it raises is a `Failure` of each sample."""
    try:
        values = [float(value) for value in group_function_of(config)(samples)]
        if len(values) != len(samples):
            raise RewardError(f"{len(values)} values for a group of {len(samples)}")
    except BaseException as error:  # noqa: BLE001 - costs this group's rewards only
        return [_raised(config.name, error)] * len(samples)
    return [_finite(config.name, value) for value in values]


def score_all(
    due: Sequence[Sequence[RewardConfig]], samples: Sequence[RewardInput]
) -> list[list[float | Failure]]:
    """Run the rewards that are due for each sample; one list a sample.

    Each sees a copy of its own: siblings share the fields of their row, which a reward may change.
    """
    return [
        [score(config, copy.deepcopy(sample)) for config in configs]
        for configs, sample in zip(due, samples, strict=True)
    ]


def _raised(reward: str, error: BaseException) -> Failure:
    return Failure(
        reward=reward,
        error=type(error).__name__,
        message=words_of(error)[:500],
        is_own=not may_pass(error),
    )


def _finite(reward: str, value: float) -> float | Failure:
    if math.isfinite(value):
        return value
    message = f"the reward is {value}"
    return Failure(reward=reward, error="ValueError", message=message, is_own=True)
