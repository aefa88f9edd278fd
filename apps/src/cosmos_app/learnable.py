"""Whether an algorithm can make anything of what a recipe samples and rewards."""

from cosmos_algos import Algorithm
from cosmos_parallel import ModelConfig
from cosmos_rollout import (
    CodeReward,
    LengthReward,
    ModelReward,
    PythonReward,
    RewardPoolConfig,
    ServiceReward,
)
from cosmos_rollout import RewardConfig as Reward

_WITHOUT_GROUPS = ("reinforce_pp", "reward", "none")
"""Advantages that a sample has by itself."""


def check_learnable(
    algorithm: Algorithm,
    rewards: RewardPoolConfig,
    *,
    num_samples: int,
    is_played: bool,
    length_kind: str,
) -> None:
    """Refuse samples and rewards that an algorithm's advantages have no meaning for.

    Args:
        algorithm: of the run.
        rewards: that samples get.
        num_samples: of each prompt.
        is_played: an environment gives rewards besides.
        length_kind: what the length of a response does to its reward; empty for nothing.

    Raises:
        ValueError: naming the settings.
    """
    if algorithm.imitation_coefficient or "teacher_logprobs" in algorithm.needs:
        return
    name = algorithm.advantage
    if name not in _WITHOUT_GROUPS and num_samples == 1:
        raise ValueError(
            f"trainer.samples_per_group is 1 and algorithm.advantage {name!r}, "
            "which compares the samples of a prompt: nothing would be learned; sample 2 or more"
        )
    if name == "pass_at_k" and algorithm.k >= num_samples:
        raise ValueError(
            f"algorithm.k is {algorithm.k} and trainer.samples_per_group {num_samples}: the best "
            "of all samples is the same for each of them, so nothing would be learned; sample "
            "more, or lower algorithm.k"
        )
    if length_kind and (name == "pass_at_k" or (name == "max_rl" and length_kind != "cap")):
        raise ValueError(
            f"algorithm.advantage is {name!r} and length_reward.kind {length_kind!r}, which makes "
            "of rewards what it has no meaning for; leave one of them out"
        )
    if not is_played and name in ("pass_at_k", "max_rl"):
        _check_meaning(name, rewards)


def check_head(training: ModelConfig) -> None:
    """Refuse a head that a recipe asks for by itself; which runs have one says the algorithm.

    Raises:
        ValueError: naming the setting.
    """
    if training.value_head:
        raise ValueError(
            "model.training.value_head is true: a run has a value head by its algorithm, 'ppo' or "
            "'reward_model', and no other has a use for one; leave it out"
        )


def _check_meaning(name: str, rewards: RewardPoolConfig) -> None:
    counted = [reward for reward in rewards.rewards if reward.weight]
    if any(reward.weight for reward in rewards.group_rewards) or any(
        isinstance(reward, (ModelReward, PythonReward, ServiceReward)) for reward in counted
    ):
        return  # what these give is only known when they do
    said = " + ".join(f"{reward.weight:g} {reward.kind}" for reward in counted)
    if name == "pass_at_k":
        if [_can_be(reward) for reward in counted] != [(0.0, 1.0)] or _has_shares(counted[0]):
            raise ValueError(
                f"algorithm.advantage is 'pass_at_k' and reward.rewards {said or 'nothing'}; its "
                "samples are right or wrong: want one reward that is 0 or 1, with weight 1"
            )
    elif sum(_can_be(reward)[0] for reward in counted) < 0.0:
        raise ValueError(
            f"algorithm.advantage is 'max_rl' and reward.rewards {said}, which can be negative; "
            "its rewards are rates of success: want what is at least 0"
        )


def _can_be(reward: Reward) -> tuple[float, float]:
    """Return the least and the most that a reward adds."""
    ends = (-1.0, 0.0) if isinstance(reward, LengthReward) else (0.0, 1.0)
    least, most = sorted(reward.weight * end for end in ends)
    return least, most


def _has_shares(reward: Reward) -> bool:
    return isinstance(reward, CodeReward) and reward.score == "share"
