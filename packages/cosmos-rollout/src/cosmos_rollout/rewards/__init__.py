"""Rewards of finished samples: built in or the user's, computed in worker processes."""

from cosmos_rollout.rewards.builtin import (
    BoxedMathReward,
    ExactReward,
    FormatReward,
    LengthReward,
    PythonReward,
    RewardConfig,
)
from cosmos_rollout.rewards.pool import RewardPool, RewardPoolConfig
from cosmos_rollout.rewards.scoring import Failure, Outcome, RewardFunction, RewardInput, Scored

__all__ = [
    "BoxedMathReward",
    "ExactReward",
    "Failure",
    "FormatReward",
    "LengthReward",
    "Outcome",
    "PythonReward",
    "RewardConfig",
    "RewardFunction",
    "RewardInput",
    "RewardPool",
    "RewardPoolConfig",
    "Scored",
]
