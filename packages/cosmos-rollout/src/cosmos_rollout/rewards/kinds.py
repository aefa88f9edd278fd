"""Every reward of one sample that a recipe can name by its ``kind``."""

from cosmos_rollout.rewards.answers import Gsm8kReward, MathReward, MultipleChoiceReward
from cosmos_rollout.rewards.builtin import (
    BoxedMathReward,
    ExactReward,
    FormatReward,
    LengthReward,
    PythonReward,
)
from cosmos_rollout.rewards.code import CodeReward
from cosmos_rollout.rewards.model import ModelReward
from cosmos_rollout.rewards.service import ServiceReward

RewardConfig = (
    ExactReward
    | BoxedMathReward
    | MathReward
    | MultipleChoiceReward
    | Gsm8kReward
    | CodeReward
    | FormatReward
    | LengthReward
    | ModelReward
    | ServiceReward
    | PythonReward
)
