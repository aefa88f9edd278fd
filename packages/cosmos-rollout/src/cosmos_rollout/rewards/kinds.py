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
    | PythonReward
)
