"""The algorithms one can choose, as unions told apart by ``kind``, and their entrance.

Adding one is a file like its neighbours in ``recipes``, of 17 to 40 lines of code, and a line here.
"""

from collections.abc import Callable

from torch import nn

from cosmos_algos.batch import TokenBatch
from cosmos_algos.loss_sum import LossSum
from cosmos_algos.recipes.aipo import AipoConfig
from cosmos_algos.recipes.cispo import CispoConfig
from cosmos_algos.recipes.dapo import DapoConfig
from cosmos_algos.recipes.decoupled_ppo import DecoupledPpoConfig
from cosmos_algos.recipes.dpo import DpoConfig
from cosmos_algos.recipes.dr_grpo import DrGrpoConfig
from cosmos_algos.recipes.grpo import GrpoConfig
from cosmos_algos.recipes.gspo import GspoConfig
from cosmos_algos.recipes.kto import KtoConfig
from cosmos_algos.recipes.max_rl import MaxRlConfig
from cosmos_algos.recipes.on_policy_distillation import OnPolicyDistillationConfig
from cosmos_algos.recipes.opo import OpoConfig
from cosmos_algos.recipes.pass_at_k import PassAtKConfig
from cosmos_algos.recipes.ppo import PpoConfig
from cosmos_algos.recipes.reinforce_pp import ReinforcePlusPlusConfig
from cosmos_algos.recipes.reward_model import RewardModelConfig
from cosmos_algos.recipes.rloo import RlooConfig
from cosmos_algos.recipes.sapo import SapoConfig
from cosmos_algos.recipes.sft import SftConfig

# Trained on samples of the policy itself, with rewards.
AlgorithmConfig = (
    GrpoConfig
    | DapoConfig
    | DrGrpoConfig
    | RlooConfig
    | ReinforcePlusPlusConfig
    | MaxRlConfig
    | OpoConfig
    | PassAtKConfig
    | GspoConfig
    | CispoConfig
    | AipoConfig
    | SapoConfig
    | DecoupledPpoConfig
    | PpoConfig
    | OnPolicyDistillationConfig
)

# Trained on samples that are given, with labels; their ``loss`` is called like that of the others.
GivenDataConfig = SftConfig | DpoConfig | KtoConfig | RewardModelConfig


def policy_loss(config: AlgorithmConfig) -> Callable[[nn.Module, TokenBatch], LossSum]:
    """Return ``loss(model, batch)``, which runs the model once and returns the batch's part."""
    return config.build().loss
