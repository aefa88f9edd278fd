"""Tiny pipelines of images: Stable Diffusion 3 and SANA."""

from typing import Any

from cosmos_wfm.tiny.encoders import (
    CLIP_WIDTH,
    T5_WIDTH,
    clip_encoder,
    gemma_encoder,
    t5_encoder,
)
from cosmos_wfm.tiny.libraries import library, seeded
from cosmos_wfm.tiny.tokenizers import clip_tokenizer, gemma_tokenizer, t5_tokenizer

_SD3_CHANNELS = 4
_SANA_CHANNELS = 8
_SANA_TEXT_WIDTH = 16


def tiny_sd3_pipeline(*, seed: int = 0, num_layers: int = 2, width: int = 32) -> Any:
    """Build a ``StableDiffusion3Pipeline`` for images of multiples of 4 pixels, 32 by default.

    Args:
        seed: of the weights; the global random state is left as it was.
        num_layers: of the transformer.
        width: of the transformer, a multiple of 16.

    Returns:
        The pipeline, in evaluation mode (diffusers has no usable type for it).
    """
    diffusers = library("diffusers")
    with seeded(seed):
        pipeline = diffusers.StableDiffusion3Pipeline(
            transformer=_sd3_transformer(num_layers, width).eval(),
            scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0),
            vae=_sd3_vae().eval(),
            text_encoder=clip_encoder(),
            tokenizer=clip_tokenizer(),
            text_encoder_2=clip_encoder(),
            tokenizer_2=clip_tokenizer(),
            text_encoder_3=t5_encoder(),
            tokenizer_3=t5_tokenizer(),
        )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def tiny_sana_pipeline(*, seed: int = 0, num_layers: int = 2) -> Any:
    """Build a ``SanaPipeline`` for images of multiples of 32 pixels.

    Args:
        seed: of the weights; the global random state is left as it was.
        num_layers: of the transformer.

    Returns:
        The pipeline, in evaluation mode.
    """
    diffusers, tokenizer = library("diffusers"), gemma_tokenizer()
    with seeded(seed):
        pipeline = diffusers.SanaPipeline(
            tokenizer=tokenizer,
            text_encoder=gemma_encoder(tokenizer, _SANA_TEXT_WIDTH),
            vae=_sana_vae().eval(),
            transformer=_sana_transformer(num_layers).eval(),
            scheduler=diffusers.DPMSolverMultistepScheduler(
                flow_shift=3.0, use_flow_sigmas=True, prediction_type="flow_prediction"
            ),
        )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def _sd3_transformer(num_layers: int, width: int) -> Any:
    return library("diffusers").SD3Transformer2DModel(
        sample_size=16,
        patch_size=2,
        in_channels=_SD3_CHANNELS,
        out_channels=_SD3_CHANNELS,
        num_layers=num_layers,
        num_attention_heads=4,
        attention_head_dim=width // 4,
        caption_projection_dim=width,
        joint_attention_dim=T5_WIDTH,
        pooled_projection_dim=2 * CLIP_WIDTH,
        pos_embed_max_size=32,
        qk_norm="rms_norm",
    )


def _sd3_vae() -> Any:
    return library("diffusers").AutoencoderKL(
        down_block_types=("DownEncoderBlock2D", "DownEncoderBlock2D"),
        up_block_types=("UpDecoderBlock2D", "UpDecoderBlock2D"),
        block_out_channels=(8, 8),
        layers_per_block=1,
        norm_num_groups=4,
        latent_channels=_SD3_CHANNELS,
        sample_size=16,
        use_quant_conv=False,
        use_post_quant_conv=False,
        shift_factor=0.0609,
        scaling_factor=1.5305,
    )


def _sana_transformer(num_layers: int) -> Any:
    return library("diffusers").SanaTransformer2DModel(
        in_channels=_SANA_CHANNELS,
        out_channels=_SANA_CHANNELS,
        num_layers=num_layers,
        num_attention_heads=2,
        attention_head_dim=16,
        num_cross_attention_heads=2,
        cross_attention_head_dim=16,
        cross_attention_dim=32,
        caption_channels=_SANA_TEXT_WIDTH,
        sample_size=32,
        patch_size=1,
        mlp_ratio=2.5,
    )


def _sana_vae() -> Any:
    kinds = ("ResBlock", "ResBlock", "EfficientViTBlock")
    return library("diffusers").AutoencoderDC(
        in_channels=3,
        latent_channels=_SANA_CHANNELS,
        attention_head_dim=4,
        encoder_block_types=kinds,
        decoder_block_types=kinds,
        encoder_block_out_channels=(8, 8, 8),
        decoder_block_out_channels=(8, 8, 8),
        encoder_qkv_multiscales=((), (), (5,)),
        decoder_qkv_multiscales=((), (), (5,)),
        encoder_layers_per_block=(1, 1, 1),
        decoder_layers_per_block=(1, 1, 1),
        downsample_block_type="conv",
        upsample_block_type="interpolate",
        decoder_norm_types="rms_norm",
        decoder_act_fns="silu",
        scaling_factor=0.41407,
    )
