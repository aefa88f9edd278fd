"""The algorithms one can choose, as a union told apart by ``kind``, and their two entrances.

Adding one is a module like its neighbours and a line in the union.
"""

from collections.abc import Callable

from torch import nn

from cosmos_algos.batch import TokenBatch
from cosmos_algos.dapo import DapoConfig
from cosmos_algos.dr_grpo import DrGrpoConfig
from cosmos_algos.grpo import GrpoConfig
from cosmos_algos.loss_sum import LossSum

AlgorithmConfig = GrpoConfig | DapoConfig | DrGrpoConfig


def policy_loss(config: AlgorithmConfig) -> Callable[[nn.Module, TokenBatch], LossSum]:
    """Return ``loss(model, batch)``, which runs the model once and returns the batch's part."""
    return config.build().loss
