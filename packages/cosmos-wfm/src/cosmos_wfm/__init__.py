"""Fine-tuning and RL of diffusion world models on diffusers."""

from cosmos_wfm.adapter import DiffusionModelAdapter, TextCondition
from cosmos_wfm.caption_data import CaptionData, CaptionedImage, Problems
from cosmos_wfm.captions import ImageCaptions, ImageCaptionsConfig
from cosmos_wfm.checkup import CheckedPoint, check_model
from cosmos_wfm.context import share_context
from cosmos_wfm.ddrl import DdrlBatch, DdrlConfig, ddrl_loss, exponential_advantages
from cosmos_wfm.denoiser import ComputeConfig, float32_modules, shard_denoiser
from cosmos_wfm.drawing import DrawnSamples, SamplerConfig, draw_latents
from cosmos_wfm.encoding import EncodedCache, EncodedSample, SampleEncoder, cache_key
from cosmos_wfm.errors import (
    CaptionDataError,
    NoRewardsError,
    PipelineError,
    RewardError,
    RewardRequestError,
    RewardServiceError,
    RewardTimeoutError,
    SaveError,
    TrainingStoppedError,
    UploadError,
    WfmConfigError,
    WfmError,
)
from cosmos_wfm.experts import NoiseExperts, denoisers_of
from cosmos_wfm.families.cosmos_predict import CosmosPredictAdapter, NoSafetyChecker
from cosmos_wfm.families.sana import SanaAdapter
from cosmos_wfm.families.sana_video import SanaVideoAdapter
from cosmos_wfm.families.sd3 import Sd3Adapter
from cosmos_wfm.families.wan import WanAdapter
from cosmos_wfm.flow_batches import NoisingConfig, noise_encoded
from cosmos_wfm.flow_grpo import (
    FlowGrpoConfig,
    StepBatch,
    flow_grpo_loss,
)
from cosmos_wfm.flow_matching import (
    FlowBatch,
    FlowMatchingConfig,
    draw_sigmas,
    flow_matching_loss,
    shift_sigmas,
    sigma_weights,
)
from cosmos_wfm.forecast import RunForecast, check_files, forecast_run
from cosmos_wfm.guidance import Guidance, guided_velocity
from cosmos_wfm.latent_media import LatentDecoder
from cosmos_wfm.loading import adapt_pipeline, find_adapter, load_adapter, load_outline
from cosmos_wfm.matching import AwmConfig, awm_loss
from cosmos_wfm.mock_data import MockCaptions, MockCaptionsConfig
from cosmos_wfm.model_rewards import MODEL_REWARDS, ScoreRequest, load_model_reward
from cosmos_wfm.nft import ForwardBatch, NftConfig, OldPolicyDecay, nft_errors, nft_loss
from cosmos_wfm.policies import CopiedPolicies, LoraPolicies, Policies
from cosmos_wfm.prompts import Prompt, read_prompts
from cosmos_wfm.remote import ConnectRollouts, DisaggregatedConfig, RemoteRollouts
from cosmos_wfm.replica import RolloutReplica
from cosmos_wfm.reward_client import EnqueueTimeout, RewardClient, RewardServiceConfig
from cosmos_wfm.reward_wire import (
    RewardRequest,
    latents_of,
    media_of,
    pack_request,
    parse_request,
)
from cosmos_wfm.rewards import REWARDS, local_sample_scorer, local_scorer, weighted_reward
from cosmos_wfm.rl import DiffusionRl, take_rl_steps, train_rl
from cosmos_wfm.rl_config import DiffusionRlConfig
from cosmos_wfm.rollout_wire import (
    RolloutMessage,
    RolloutOrder,
    pack_order,
    pack_rollout,
    parse_order,
    parse_rollout,
)
from cosmos_wfm.rollouts import Rollout, StepParts
from cosmos_wfm.sample_rewards import SampleRewards, SampleScorer
from cosmos_wfm.sampling import (
    NoisyStep,
    SdeConfig,
    Transition,
    flow_schedule,
    log_prob,
    sample_ode,
    sample_sde,
    transition,
)
from cosmos_wfm.scenes import COLOURS, Scene, SeenShape, WantedShape, find_shapes, read_scene
from cosmos_wfm.scoring import Scorer, Scores
from cosmos_wfm.sft import DiffusionSftConfig, fill_cache, train_sft
from cosmos_wfm.shards import ShardCaptions, ShardCaptionsConfig
from cosmos_wfm.tiny import (
    save_pipeline,
    tiny_captions,
    tiny_cosmos_pipeline,
    tiny_sana_pipeline,
    tiny_sana_video_pipeline,
    tiny_sd3_pipeline,
    tiny_wan_pipeline,
    tiny_wan_small_pipeline,
)
from cosmos_wfm.training_run import RunControl, RunOutputs, Validated, ValidationHooks, check_is_new
from cosmos_wfm.tuning import FullTuning, LoraTuning, TuningConfig
from cosmos_wfm.uploads import UploadConfig, upload_directory
from cosmos_wfm.validation import ValidationConfig, draw_samples, save_grid, write_samples
from cosmos_wfm.videos import VideoCaptions, VideoCaptionsConfig, write_video

__all__ = [
    "COLOURS",
    "MODEL_REWARDS",
    "REWARDS",
    "AwmConfig",
    "CaptionData",
    "CaptionDataError",
    "CaptionedImage",
    "CheckedPoint",
    "ComputeConfig",
    "ConnectRollouts",
    "CopiedPolicies",
    "CosmosPredictAdapter",
    "DdrlBatch",
    "DdrlConfig",
    "DiffusionModelAdapter",
    "DiffusionRl",
    "DiffusionRlConfig",
    "DiffusionSftConfig",
    "DisaggregatedConfig",
    "DrawnSamples",
    "EncodedCache",
    "EncodedSample",
    "EnqueueTimeout",
    "FlowBatch",
    "FlowGrpoConfig",
    "FlowMatchingConfig",
    "ForwardBatch",
    "FullTuning",
    "Guidance",
    "ImageCaptions",
    "ImageCaptionsConfig",
    "LatentDecoder",
    "LoraPolicies",
    "LoraTuning",
    "MockCaptions",
    "MockCaptionsConfig",
    "NftConfig",
    "NoRewardsError",
    "NoSafetyChecker",
    "NoiseExperts",
    "NoisingConfig",
    "NoisyStep",
    "OldPolicyDecay",
    "PipelineError",
    "Policies",
    "Problems",
    "Prompt",
    "RemoteRollouts",
    "RewardClient",
    "RewardError",
    "RewardRequest",
    "RewardRequestError",
    "RewardServiceConfig",
    "RewardServiceError",
    "RewardTimeoutError",
    "Rollout",
    "RolloutMessage",
    "RolloutOrder",
    "RolloutReplica",
    "RunControl",
    "RunForecast",
    "RunOutputs",
    "SampleEncoder",
    "SampleRewards",
    "SampleScorer",
    "SamplerConfig",
    "SanaAdapter",
    "SanaVideoAdapter",
    "SaveError",
    "Scene",
    "ScoreRequest",
    "Scorer",
    "Scores",
    "Sd3Adapter",
    "SdeConfig",
    "SeenShape",
    "ShardCaptions",
    "ShardCaptionsConfig",
    "StepBatch",
    "StepParts",
    "TextCondition",
    "TrainingStoppedError",
    "Transition",
    "TuningConfig",
    "UploadConfig",
    "UploadError",
    "Validated",
    "ValidationConfig",
    "ValidationHooks",
    "VideoCaptions",
    "VideoCaptionsConfig",
    "WanAdapter",
    "WantedShape",
    "WfmConfigError",
    "WfmError",
    "adapt_pipeline",
    "awm_loss",
    "cache_key",
    "check_files",
    "check_is_new",
    "check_model",
    "ddrl_loss",
    "denoisers_of",
    "draw_latents",
    "draw_samples",
    "draw_sigmas",
    "exponential_advantages",
    "fill_cache",
    "find_adapter",
    "find_shapes",
    "float32_modules",
    "flow_grpo_loss",
    "flow_matching_loss",
    "flow_schedule",
    "forecast_run",
    "guided_velocity",
    "latents_of",
    "load_adapter",
    "load_model_reward",
    "load_outline",
    "local_sample_scorer",
    "local_scorer",
    "log_prob",
    "media_of",
    "nft_errors",
    "nft_loss",
    "noise_encoded",
    "pack_order",
    "pack_request",
    "pack_rollout",
    "parse_order",
    "parse_request",
    "parse_rollout",
    "read_prompts",
    "read_scene",
    "sample_ode",
    "sample_sde",
    "save_grid",
    "save_pipeline",
    "shard_denoiser",
    "share_context",
    "shift_sigmas",
    "sigma_weights",
    "take_rl_steps",
    "tiny_captions",
    "tiny_cosmos_pipeline",
    "tiny_sana_pipeline",
    "tiny_sana_video_pipeline",
    "tiny_sd3_pipeline",
    "tiny_wan_pipeline",
    "tiny_wan_small_pipeline",
    "train_rl",
    "train_sft",
    "transition",
    "upload_directory",
    "weighted_reward",
    "write_samples",
    "write_video",
]
