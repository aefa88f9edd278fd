"""Advantages, losses, corrections and batching for RL, as pure functions over ``[B, T]`` tensors.

One call builds a step's micro-batches (``config.build().batches``), one is a micro-batch's loss
(``policy_loss(config)``); everything they are made of can be used alone.
"""

from cosmos_algos.advantages import (
    AdvantageName,
    StepRewards,
    batch_std_advantages,
    dr_grpo_advantages,
    group_advantages,
    group_ids,
    grpo_advantages,
    max_rl_advantages,
    opo_advantages,
    pass_at_k_advantages,
    reinforce_pp_advantages,
    reinforce_pp_baseline_advantages,
    rloo_advantages,
    step_advantages,
)
from cosmos_algos.aggregation import (
    AggregationConfig,
    SampleWeights,
    imitation_weights,
    sample_weights,
)
from cosmos_algos.algorithm import Algorithm, policy_algorithm
from cosmos_algos.batch import ScoreField, TokenBatch, batch_of_targets, collate, empty_batch
from cosmos_algos.corrections import (
    CorrectionConfig,
    IcePopConfig,
    ImportanceConfig,
    MisConfig,
    NoCorrection,
    TisConfig,
    correction_weights,
)
from cosmos_algos.distillation import (
    TopK,
    candidate_logprobs,
    generalised_jsd,
    top_k,
    top_k_jsd,
    with_tail,
)
from cosmos_algos.divergence import KlConfig, k3, kl_loss, kl_reward, kl_values, pathwise_kl
from cosmos_algos.errors import (
    AlgorithmConfigError,
    AlgosError,
    EmptyStepError,
    MissingScoresError,
    ModelHeadError,
    PairingError,
    RewardError,
    ShapeError,
    TokenIdError,
    TrajectoryError,
)
from cosmos_algos.labelled import (
    KtoBatch,
    LabelledTokens,
    collate_labelled,
    collate_pairs,
    paired,
)
from cosmos_algos.logprobs import TokenScores, chunked_logprobs, scores_from_logits
from cosmos_algos.loss_sum import LossSum
from cosmos_algos.mismatch import mismatch_sums, summarise_metrics
from cosmos_algos.objective import ObjectiveConfig, policy_objective, proximal_logprobs
from cosmos_algos.output_head import LogitScaling, OutputHead
from cosmos_algos.policy_recipe import PolicyRecipe
from cosmos_algos.preferences import (
    bradley_terry_losses,
    dpo_losses,
    ipo_losses,
    kto_baseline,
    kto_losses,
)
from cosmos_algos.prefixes import (
    prefix_tree_mask,
    prefix_tree_positions,
    prefixes_trained_once,
    shared_prefix_masks,
)
from cosmos_algos.recipe import AlgorithmConfig, GivenDataConfig, policy_loss
from cosmos_algos.recipes.aipo import AipoConfig
from cosmos_algos.recipes.cispo import CispoConfig
from cosmos_algos.recipes.dapo import DapoConfig
from cosmos_algos.recipes.decoupled_ppo import DecoupledPpoConfig
from cosmos_algos.recipes.distillation import DistillationConfig
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
from cosmos_algos.rejection import (
    Distances,
    OffPolicyMask,
    RatioMask,
    RejectionConfig,
    StalenessMask,
    WorstTokenMask,
    kept_tokens,
)
from cosmos_algos.rows import in_one_row, position_ids, with_idle_tokens
from cosmos_algos.samples import Samples
from cosmos_algos.scoring import model_scores
from cosmos_algos.shaping import (
    OverlongConfig,
    budget_rewards,
    capped_budget_rewards,
    groups_with_signal,
    length_rewards,
    overlong_penalties,
    without_truncated,
)
from cosmos_algos.splitting import Share, split_batches, split_ranks
from cosmos_algos.surrogate import (
    AipoClip,
    CispoClip,
    ClipConfig,
    GspoClip,
    SapoGate,
    Surrogate,
    SurrogateConfig,
    clipped_surrogate,
    policy_surrogate,
)
from cosmos_algos.token_advantages import (
    GaeConfig,
    Moments,
    generalised_advantages,
    returns_to_go,
    terminal_rewards,
    token_moments,
    whitened,
)
from cosmos_algos.values import (
    CriticConfig,
    advantage_moments,
    critic_objective,
    critic_values,
    value_losses,
    with_gae,
    with_whitened_advantages,
)

__all__ = [
    "AdvantageName",
    "AggregationConfig",
    "AipoClip",
    "AipoConfig",
    "Algorithm",
    "AlgorithmConfig",
    "AlgorithmConfigError",
    "AlgosError",
    "CispoClip",
    "CispoConfig",
    "ClipConfig",
    "CorrectionConfig",
    "CriticConfig",
    "DapoConfig",
    "DecoupledPpoConfig",
    "Distances",
    "DistillationConfig",
    "DpoConfig",
    "DrGrpoConfig",
    "EmptyStepError",
    "GaeConfig",
    "GivenDataConfig",
    "GrpoConfig",
    "GspoClip",
    "GspoConfig",
    "IcePopConfig",
    "ImportanceConfig",
    "KlConfig",
    "KtoBatch",
    "KtoConfig",
    "LabelledTokens",
    "LogitScaling",
    "LossSum",
    "MaxRlConfig",
    "MisConfig",
    "MissingScoresError",
    "ModelHeadError",
    "Moments",
    "NoCorrection",
    "ObjectiveConfig",
    "OffPolicyMask",
    "OnPolicyDistillationConfig",
    "OpoConfig",
    "OutputHead",
    "OverlongConfig",
    "PairingError",
    "PassAtKConfig",
    "PolicyRecipe",
    "PpoConfig",
    "RatioMask",
    "ReinforcePlusPlusConfig",
    "RejectionConfig",
    "RewardError",
    "RewardModelConfig",
    "RlooConfig",
    "SampleWeights",
    "Samples",
    "SapoConfig",
    "SapoGate",
    "ScoreField",
    "SftConfig",
    "ShapeError",
    "Share",
    "StalenessMask",
    "StepRewards",
    "Surrogate",
    "SurrogateConfig",
    "TisConfig",
    "TokenBatch",
    "TokenIdError",
    "TokenScores",
    "TopK",
    "TrajectoryError",
    "WorstTokenMask",
    "advantage_moments",
    "batch_of_targets",
    "batch_std_advantages",
    "bradley_terry_losses",
    "budget_rewards",
    "candidate_logprobs",
    "capped_budget_rewards",
    "chunked_logprobs",
    "clipped_surrogate",
    "collate",
    "collate_labelled",
    "collate_pairs",
    "correction_weights",
    "critic_objective",
    "critic_values",
    "dpo_losses",
    "dr_grpo_advantages",
    "empty_batch",
    "generalised_advantages",
    "generalised_jsd",
    "group_advantages",
    "group_ids",
    "groups_with_signal",
    "grpo_advantages",
    "imitation_weights",
    "in_one_row",
    "ipo_losses",
    "k3",
    "kept_tokens",
    "kl_loss",
    "kl_reward",
    "kl_values",
    "kto_baseline",
    "kto_losses",
    "length_rewards",
    "max_rl_advantages",
    "mismatch_sums",
    "model_scores",
    "opo_advantages",
    "overlong_penalties",
    "paired",
    "pass_at_k_advantages",
    "pathwise_kl",
    "policy_algorithm",
    "policy_loss",
    "policy_objective",
    "policy_surrogate",
    "position_ids",
    "prefix_tree_mask",
    "prefix_tree_positions",
    "prefixes_trained_once",
    "proximal_logprobs",
    "reinforce_pp_advantages",
    "reinforce_pp_baseline_advantages",
    "returns_to_go",
    "rloo_advantages",
    "sample_weights",
    "scores_from_logits",
    "shared_prefix_masks",
    "split_batches",
    "split_ranks",
    "step_advantages",
    "summarise_metrics",
    "terminal_rewards",
    "token_moments",
    "top_k",
    "top_k_jsd",
    "value_losses",
    "whitened",
    "with_gae",
    "with_idle_tokens",
    "with_tail",
    "with_whitened_advantages",
    "without_truncated",
]
