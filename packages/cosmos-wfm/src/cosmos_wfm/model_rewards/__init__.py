"""Rewards that are models: nothing of one is imported before it is asked for.

Each is loaded from a local directory (a judge from an address) and scores the requests of a reward
service: ``cosmos-app reward-service pickscore=/models/PickScore_v1``.
"""

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from cosmos_wfm.errors import WfmConfigError
from cosmos_wfm.reward_wire import RewardRequest

ScoreRequest = Callable[[RewardRequest], Mapping[str, Sequence[float]]]
"""From samples to lists of scores by their names."""

MODEL_REWARDS: Mapping[str, str] = {
    "cosmos_reason1": "cosmos_wfm.model_rewards.cosmos_reason1:CosmosReason1",
    "gen_eval": "cosmos_wfm.model_rewards.gen_eval:GenEval",
    "hpsv2": "cosmos_wfm.model_rewards.hpsv2:Hpsv2",
    "hpsv3": "cosmos_wfm.model_rewards.hpsv3:Hpsv3",
    "image_reward": "cosmos_wfm.model_rewards.image_reward:ImageReward",
    "judge": "cosmos_wfm.model_rewards.judge:Judge",
    "ocr": "cosmos_wfm.model_rewards.ocr:Ocr",
    "pickscore": "cosmos_wfm.model_rewards.pickscore:PickScore",
    "video_align": "cosmos_wfm.model_rewards.video_align:VideoAlign",
}
"""Name of a reward to its class, which takes a directory or an address."""


def load_model_reward(name: str, source: str) -> ScoreRequest:
    """Load a reward.

    Args:
        name: one of ``MODEL_REWARDS``.
        source: directory of its model, or address of a judge.

    Raises:
        WfmConfigError: if there is no such reward, or nothing was named to load.
    """
    if name not in MODEL_REWARDS or not source:
        raise WfmConfigError(
            f"{name} is no model reward; there are {', '.join(MODEL_REWARDS)}"
            if name not in MODEL_REWARDS
            else f"{name} is a model: say where it is, as {name}=DIRECTORY"
        )
    module, _, attribute = MODEL_REWARDS[name].partition(":")
    reward: Any = getattr(importlib.import_module(module), attribute)
    return reward(source)
