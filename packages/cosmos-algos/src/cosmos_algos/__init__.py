"""Advantages, losses, corrections and batching for RL, as pure functions over ``[B, T]`` tensors.

One call builds a step's micro-batches (``config.build().batches``), one is a micro-batch's loss
(``policy_loss(config)``); everything they are made of can be used alone.
"""

from cosmos_algos.advantages import (
    AdvantageName,
    batch_std_advantages,
    dr_grpo_advantages,
    group_advantages,
    group_ids,
    grpo_advantages,
    rloo_advantages,
)
from cosmos_algos.aggregation import AggregationConfig, SampleWeights, sample_weights
from cosmos_algos.algorithm import Algorithm, Share
from cosmos_algos.batch import TokenBatch, collate, empty_batch
from cosmos_algos.corrections import (
    CorrectionConfig,
    IcePopConfig,
    NoCorrection,
    TisConfig,
    correction_weights,
)
from cosmos_algos.dapo import DapoConfig
from cosmos_algos.divergence import KlConfig, k3, kl_loss
from cosmos_algos.dr_grpo import DrGrpoConfig
from cosmos_algos.errors import (
    AlgorithmConfigError,
    AlgosError,
    ModelHeadError,
    TrajectoryError,
)
from cosmos_algos.grpo import GrpoConfig
from cosmos_algos.logprobs import TokenScores, chunked_logprobs, scores_from_logits
from cosmos_algos.loss_sum import LossSum
from cosmos_algos.mismatch import mismatch_sums, summarise_metrics
from cosmos_algos.recipe import AlgorithmConfig, policy_loss
from cosmos_algos.scoring import model_scores
from cosmos_algos.splitting import split_batches, split_ranks
from cosmos_algos.surrogate import (
    ClipConfig,
    ObjectiveConfig,
    clipped_surrogate,
    policy_objective,
)

__all__ = [
    "AdvantageName",
    "AggregationConfig",
    "Algorithm",
    "AlgorithmConfig",
    "AlgorithmConfigError",
    "AlgosError",
    "ClipConfig",
    "CorrectionConfig",
    "DapoConfig",
    "DrGrpoConfig",
    "GrpoConfig",
    "IcePopConfig",
    "KlConfig",
    "LossSum",
    "ModelHeadError",
    "NoCorrection",
    "ObjectiveConfig",
    "SampleWeights",
    "Share",
    "TisConfig",
    "TokenBatch",
    "TokenScores",
    "TrajectoryError",
    "batch_std_advantages",
    "chunked_logprobs",
    "clipped_surrogate",
    "collate",
    "correction_weights",
    "dr_grpo_advantages",
    "empty_batch",
    "group_advantages",
    "group_ids",
    "grpo_advantages",
    "k3",
    "kl_loss",
    "mismatch_sums",
    "model_scores",
    "policy_loss",
    "policy_objective",
    "rloo_advantages",
    "sample_weights",
    "scores_from_logits",
    "split_batches",
    "split_ranks",
    "summarise_metrics",
]
