"""The algorithms of RL runs: what each compares with, and its loss."""

import math
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from cosmos_algos import batch_std_advantages, grpo_advantages
from cosmos_wfm.adapter import DiffusionModelAdapter
from cosmos_wfm.ddrl import DdrlConfig, ddrl_loss
from cosmos_wfm.drawing import SamplerConfig
from cosmos_wfm.errors import WfmConfigError
from cosmos_wfm.flow_grpo import FlowGrpoConfig, flow_grpo_loss
from cosmos_wfm.matching import AwmConfig, awm_loss
from cosmos_wfm.nft import NftConfig, nft_loss
from cosmos_wfm.policies import CopiedPolicies, LoraPolicies, Policies
from cosmos_wfm.sampling import flow_schedule
from cosmos_wfm.step_rewards import StepRewards
from cosmos_wfm.training_data import DataConfig
from cosmos_wfm.tuning import FullTuning, TuningConfig

RlAlgorithm = NftConfig | AwmConfig | FlowGrpoConfig | DdrlConfig


def has_old(algorithm: RlAlgorithm) -> bool:
    """Return whether samples are drawn by an old policy, which is not the one that is trained."""
    return isinstance(algorithm, NftConfig)


def old_lags(algorithm: RlAlgorithm) -> bool:
    """Return whether the old policy is another one than the newest at a step's beginning."""
    return isinstance(algorithm, NftConfig) and algorithm.decay.rate > 0


def steps_config(algorithm: RlAlgorithm) -> FlowGrpoConfig | None:
    """Return how an algorithm trains noisy steps; ``None`` for those of the forward process."""
    if isinstance(algorithm, DdrlConfig):
        return algorithm.policy
    return algorithm if isinstance(algorithm, FlowGrpoConfig) else None


def check_algorithm(
    algorithm: RlAlgorithm, sampler: SamplerConfig, data: DataConfig | None, micro_batch_size: int
) -> None:
    """Refuse what does not go with an algorithm.

    Raises:
        WfmConfigError: names the field that is wrong.
    """
    if isinstance(algorithm, DdrlConfig) != (data is not None):
        raise WfmConfigError("rl: ddrl needs data, and the other algorithms take none")
    if data is not None and len(data.buckets) > 1 and micro_batch_size > 1:
        raise WfmConfigError(
            f"rl: data.buckets has {len(data.buckets)} sizes, but ddrl takes the samples of a "
            f"micro-batch in one; leave buckets empty, or set micro_batch_size, now "
            f"{micro_batch_size}, to 1"
        )
    steps = steps_config(algorithm)
    if steps is not None:
        steps.sde.noise_levels(flow_schedule(sampler.num_steps, sampler.shift or 1.0))
    elif sampler.guidance:
        raise WfmConfigError(
            f"rl: {algorithm.kind} trains the velocity without guidance; set sampler.guidance = 0"
        )


def make_policies(
    adapter: DiffusionModelAdapter, tuning: TuningConfig, algorithm: RlAlgorithm
) -> Policies:
    """Return what the algorithm compares with; call after tuning is prepared, before sharding."""
    if isinstance(tuning, FullTuning):
        penalised = steps_config(algorithm) or algorithm
        kl = 0.0 if isinstance(penalised, DdrlConfig) else penalised.kl
        return CopiedPolicies(adapter, old=has_old(algorithm), reference=kl > 0)
    return LoraPolicies(adapter)


def make_loss(adapter: DiffusionModelAdapter, algorithm: RlAlgorithm, policies: Policies) -> Any:
    """Return the algorithm's loss, which takes the batches that the algorithm makes."""
    match algorithm:
        case NftConfig():
            return nft_loss(adapter, algorithm, policies)
        case AwmConfig():
            return awm_loss(adapter, algorithm, policies)
        case FlowGrpoConfig():
            return flow_grpo_loss(adapter, algorithm, policies)
        case DdrlConfig():
            return ddrl_loss(adapter, algorithm, policies)


def advantages_of(algorithm: RlAlgorithm, rewards: StepRewards) -> Float[Tensor, " N"]:
    """Return the advantages of all samples of a step; NaN of those that are not trained on."""
    trained, size = rewards.trained, rewards.group_size
    values = rewards.values.masked_fill(~trained, math.nan)
    groups = torch.arange(len(values)) // size
    if isinstance(algorithm, DdrlConfig):
        found = algorithm.advantages(values, groups)
    elif algorithm.standardise == "all":
        found = batch_std_advantages(values, groups, eps=1e-4)
    else:
        found = grpo_advantages(values, groups, eps=1e-4)
    return found.float().masked_fill(~trained, math.nan)
