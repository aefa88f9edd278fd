"""Fine-tuning of diffusion world models on diffusers: adapters, flow matching, SFT."""

from cosmos_wfm.adapter import DiffusionModelAdapter, TextCondition
from cosmos_wfm.captions import CaptionedImage, ImageCaptions, ImageCaptionsConfig
from cosmos_wfm.checkup import CheckedPoint, check_model
from cosmos_wfm.errors import CaptionDataError, PipelineError, WfmConfigError, WfmError
from cosmos_wfm.flow_matching import (
    FlowBatch,
    FlowMatchingConfig,
    draw_sigmas,
    flow_matching_loss,
    shift_sigmas,
    sigma_weights,
)
from cosmos_wfm.loading import load_adapter
from cosmos_wfm.sd3 import Sd3Adapter
from cosmos_wfm.sft import DiffusionSftConfig, train_sft
from cosmos_wfm.tiny import tiny_captions, tiny_sd3_pipeline
from cosmos_wfm.tuning import FullTuning, LoraTuning, TuningConfig

__all__ = [
    "CaptionDataError",
    "CaptionedImage",
    "CheckedPoint",
    "DiffusionModelAdapter",
    "DiffusionSftConfig",
    "FlowBatch",
    "FlowMatchingConfig",
    "FullTuning",
    "ImageCaptions",
    "ImageCaptionsConfig",
    "LoraTuning",
    "PipelineError",
    "Sd3Adapter",
    "TextCondition",
    "TuningConfig",
    "WfmConfigError",
    "WfmError",
    "check_model",
    "draw_sigmas",
    "flow_matching_loss",
    "load_adapter",
    "shift_sigmas",
    "sigma_weights",
    "tiny_captions",
    "tiny_sd3_pipeline",
    "train_sft",
]
