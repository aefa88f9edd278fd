"""Tiny pipelines of videos: SANA-Video, Cosmos-Predict2.5 and Wan."""

from typing import Any

from cosmos_wfm.families.cosmos_predict import NoSafetyChecker, resize_without_torchvision
from cosmos_wfm.tiny.encoders import gemma_encoder, qwen_encoder, umt5_encoder
from cosmos_wfm.tiny.libraries import library, seeded
from cosmos_wfm.tiny.tokenizers import gemma_tokenizer, qwen_tokenizer, t5_tokenizer

_CHANNELS = 16
_SMALL_WAN_CHANNELS = 48
_SANA_TEXT_WIDTH = 16
_WAN_TEXT_WIDTH = 32
_QWEN_WIDTH = 16
_QWEN_LAYERS = 2
_COSMOS_TEXT_WIDTH = 24


def tiny_sana_video_pipeline(*, seed: int = 0, num_layers: int = 2) -> Any:
    """Build a ``SanaVideoPipeline`` for videos of multiples of 32 pixels and 4 k + 1 frames.

    Args:
        seed: of the weights; the global random state is left as it was.
        num_layers: of the transformer.

    Returns:
        The pipeline, in evaluation mode.
    """
    diffusers, tokenizer = library("diffusers"), gemma_tokenizer()
    with seeded(seed):
        transformer = diffusers.SanaVideoTransformer3DModel(
            in_channels=_CHANNELS,
            out_channels=_CHANNELS,
            num_layers=num_layers,
            num_attention_heads=2,
            attention_head_dim=12,
            num_cross_attention_heads=2,
            cross_attention_head_dim=12,
            cross_attention_dim=24,
            caption_channels=_SANA_TEXT_WIDTH,
            mlp_ratio=2.5,
            sample_size=30,
            patch_size=(1, 2, 2),
            qk_norm="rms_norm_across_heads",
            rope_max_seq_len=32,
        )
        pipeline = diffusers.SanaVideoPipeline(
            tokenizer=tokenizer,
            text_encoder=gemma_encoder(tokenizer, _SANA_TEXT_WIDTH),
            vae=_wan_vae(),
            transformer=transformer.eval(),
            scheduler=diffusers.DPMSolverMultistepScheduler(
                flow_shift=8.0, use_flow_sigmas=True, prediction_type="flow_prediction"
            ),
        )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def tiny_cosmos_pipeline(*, seed: int = 0, num_layers: int = 2) -> Any:
    """Build a ``Cosmos2_5_PredictBasePipeline`` for multiples of 16 pixels and 4 k + 1 frames.

    Args:
        seed: of the weights; the global random state is left as it was.
        num_layers: of the transformer.

    Returns:
        The pipeline, in evaluation mode, with a safety checker that lets everything pass.
    """
    resize_without_torchvision()
    diffusers, tokenizer = library("diffusers"), qwen_tokenizer()
    with seeded(seed):
        transformer = diffusers.CosmosTransformer3DModel(
            in_channels=_CHANNELS + 1,
            out_channels=_CHANNELS,
            num_layers=num_layers,
            num_attention_heads=2,
            attention_head_dim=16,
            mlp_ratio=2,
            text_embed_dim=_COSMOS_TEXT_WIDTH,
            adaln_lora_dim=4,
            max_size=(8, 32, 32),
            patch_size=(1, 2, 2),
            rope_scale=(1.0, 3.0, 3.0),
            concat_padding_mask=True,
            extra_pos_embed_type=None,
            use_crossattn_projection=True,
            crossattn_proj_in_channels=_QWEN_WIDTH * _QWEN_LAYERS,
            encoder_hidden_states_channels=_COSMOS_TEXT_WIDTH,
        )
        pipeline = diffusers.Cosmos2_5_PredictBasePipeline(
            text_encoder=qwen_encoder(tokenizer, _QWEN_WIDTH, _QWEN_LAYERS),
            tokenizer=tokenizer,
            transformer=transformer.eval(),
            vae=_wan_vae(),
            scheduler=diffusers.UniPCMultistepScheduler(
                use_karras_sigmas=True,
                use_flow_sigmas=True,
                prediction_type="flow_prediction",
                sigma_max=200.0,
                sigma_min=0.01,
            ),
            safety_checker=NoSafetyChecker(),
        )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def tiny_wan_pipeline(*, seed: int = 0, num_layers: int = 2, boundary: float | None = None) -> Any:
    """Build a ``WanPipeline`` for multiples of 16 pixels and 4 k + 1 frames.

    Args:
        seed: of the weights; the global random state is left as it was.
        num_layers: of each transformer.
        boundary: noise level above which the first of two transformers works, as in Wan 2.2 (0.875
            in the released one); ``None`` for the one transformer of Wan 2.1.

    Returns:
        The pipeline, in evaluation mode.
    """
    with seeded(seed):
        other = None if boundary is None else _wan_transformer(num_layers).eval()
        return _wan_pipeline(
            transformer=_wan_transformer(num_layers).eval(),
            transformer_2=other,
            boundary_ratio=boundary,
            vae=_wan_vae(),
        )


def tiny_wan_small_pipeline(*, seed: int = 0, num_layers: int = 2) -> Any:
    """Build a ``WanPipeline`` as the small form of Wan 2.2 is, for multiples of 32 pixels.

    One transformer, timesteps by token, and a VAE of 48 channels that is 16 times smaller in space.

    Args:
        seed: of the weights; the global random state is left as it was.
        num_layers: of the transformer.

    Returns:
        The pipeline, in evaluation mode.
    """
    with seeded(seed):
        return _wan_pipeline(
            transformer=_wan_transformer(num_layers, channels=_SMALL_WAN_CHANNELS).eval(),
            transformer_2=None,
            expand_timesteps=True,
            vae=_small_wan_vae(),
        )


def _wan_pipeline(**parts: Any) -> Any:
    diffusers = library("diffusers")
    pipeline = diffusers.WanPipeline(
        tokenizer=t5_tokenizer(),
        text_encoder=umt5_encoder(_WAN_TEXT_WIDTH),
        scheduler=diffusers.UniPCMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0
        ),
        **parts,
    )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def _wan_transformer(num_layers: int, channels: int = _CHANNELS) -> Any:
    return library("diffusers").WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=channels,
        out_channels=channels,
        text_dim=_WAN_TEXT_WIDTH,
        freq_dim=256,
        ffn_dim=32,
        num_layers=num_layers,
        cross_attn_norm=True,
        qk_norm="rms_norm_across_heads",
        rope_max_seq_len=32,
    )


def _wan_vae() -> Any:
    """Return Wan 2.1's layout, 8 times smaller in space and 4 in time, with its own constants."""
    return (
        library("diffusers")
        .AutoencoderKLWan(
            base_dim=4,
            z_dim=_CHANNELS,
            dim_mult=[1, 1, 1, 1],
            num_res_blocks=1,
            temperal_downsample=[False, True, True],
        )
        .eval()
    )


def _small_wan_vae() -> Any:
    """Return Wan 2.2's layout: patches of 2 pixels, then 8 times smaller in space, 4 in time."""
    channels = range(_SMALL_WAN_CHANNELS)
    return (
        library("diffusers")
        .AutoencoderKLWan(
            base_dim=4,
            decoder_base_dim=4,
            z_dim=_SMALL_WAN_CHANNELS,
            dim_mult=[1, 1, 1, 1],
            num_res_blocks=1,
            temperal_downsample=[False, True, True],
            is_residual=True,
            patch_size=2,
            in_channels=12,
            out_channels=12,
            scale_factor_spatial=16,
            latents_mean=[0.05 * (c % 7) - 0.15 for c in channels],
            latents_std=[1.0 + 0.1 * (c % 5) for c in channels],
        )
        .eval()
    )
