"""Rewards of finished samples: built in or the user's, computed in worker processes."""

from cosmos_rollout.rewards.answers import Gsm8kReward, MathReward, MultipleChoiceReward
from cosmos_rollout.rewards.builtin import (
    BoxedMathReward,
    ExactReward,
    FormatReward,
    LengthReward,
    PythonReward,
)
from cosmos_rollout.rewards.code import CodeReward
from cosmos_rollout.rewards.group import GroupReward
from cosmos_rollout.rewards.kinds import RewardConfig
from cosmos_rollout.rewards.model import ModelReward
from cosmos_rollout.rewards.pool import RewardPool, RewardPoolConfig
from cosmos_rollout.rewards.sandbox import (
    ProgramResult,
    SandboxLimits,
    SandboxProtection,
    run_program,
    sandbox_protection,
)
from cosmos_rollout.rewards.scoring import (
    Failure,
    GroupRewardFunction,
    Outcome,
    RewardFunction,
    RewardInput,
    Scored,
)
from cosmos_rollout.rewards.service import ServiceReward
from cosmos_rollout.rewards.wire import sample_from_json

__all__ = [
    "BoxedMathReward",
    "CodeReward",
    "ExactReward",
    "Failure",
    "FormatReward",
    "GroupReward",
    "GroupRewardFunction",
    "Gsm8kReward",
    "LengthReward",
    "MathReward",
    "ModelReward",
    "MultipleChoiceReward",
    "Outcome",
    "ProgramResult",
    "PythonReward",
    "RewardConfig",
    "RewardFunction",
    "RewardInput",
    "RewardPool",
    "RewardPoolConfig",
    "SandboxLimits",
    "SandboxProtection",
    "Scored",
    "ServiceReward",
    "run_program",
    "sample_from_json",
    "sandbox_protection",
]
