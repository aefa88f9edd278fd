"""Muse Glimmer of torchtitan: words alone, with attention that is exact in any precision.

Most layers look back over a window and turn queries and keys; every fourth looks at all and turns
nothing. The head multiplies its logits and bounds them by a hyperbolic tangent.
"""

from typing import Any

from torchtitan.models.common import Linear, RMSNorm
from torchtitan.models.common.attention import QKVLinear
from torchtitan.models.common.decoder import Decoder
from torchtitan.models.muse_glimmer.model import (
    Attention,
    EmbeddingWithNorm,
    MuseGlimmerModel,
    MuseGlimmerTransformerBlock,
    RMSGainCenterNorm,
    SoftCappedLinear,
)
from torchtitan.models.muse_glimmer.state_dict_adapter import MuseGlimmerStateDictAdapter

from cosmos_parallel.native.attention import ExactAttention
from cosmos_parallel.native.names import HfNames
from cosmos_parallel.native.pieces import embedding, feed_forward, norm, rope

_CARRIED = ("model.vision_tower.", "model.vision_adapter.", "model.vision_projection.")


def muse_glimmer(config: Any) -> Decoder.Config:
    """Return torchtitan's config of the language model of a Muse Glimmer."""
    dim = config.hidden_size
    return MuseGlimmerModel.Config(
        dim=dim,
        vocab_size=config.vocab_size,
        enable_weight_tying=False,
        tok_embeddings=EmbeddingWithNorm.Config(
            embedding=embedding(config),
            norm=_norm_without_weight(config, dim),
        ),
        norm=norm(config),
        lm_head=SoftCappedLinear.Config(
            in_features=dim,
            out_features=config.vocab_size,
            output_multiplier=config.output_multiplier,
            output_soft_cap_temp=config.final_logit_softcapping,
        ),
        layers=[_layer(config, index) for index in range(config.num_hidden_layers)],
    )


def names(decoder: Decoder.Config) -> HfNames:
    """Return what files call the tensors; what sees is carried along."""
    table = MuseGlimmerStateDictAdapter(decoder, None).from_hf_map  # pyright: ignore
    return HfNames(
        {theirs: ours for theirs, ours in table.items() if not theirs.startswith(_CARRIED)},
        carried=_CARRIED,
    )


def _layer(config: Any, index: int) -> MuseGlimmerTransformerBlock.Config:
    return MuseGlimmerTransformerBlock.Config(
        attention_norm=_centred_norm(config, config.rms_norm_eps),
        post_attention_norm=_centred_norm(config, config.post_norm_eps),
        ffn_norm=_centred_norm(config, config.rms_norm_eps),
        post_ffn_norm=_centred_norm(config, config.post_norm_eps),
        attention=_attention(config, index),
        feed_forward=feed_forward(config, config.intermediate_size),
    )


def _attention(config: Any, index: int) -> Attention.Config:
    width, dim = config.head_dim, config.hidden_size
    is_local = config.layer_types[index] == "sliding_attention"
    window = config.sliding_window if is_local else None
    across = config.num_attention_heads * width
    queries, keys = (
        Linear.Config(in_features=dim, out_features=num * width)
        for num in (config.num_attention_heads, config.num_key_value_heads)
    )
    return Attention.Config(
        n_heads=config.num_attention_heads,
        n_kv_heads=config.num_key_value_heads,
        head_dim=width,
        dim=dim,
        qkv_linear=QKVLinear.Config(head_dim=width, wq=queries, wkv=keys),
        wo=Linear.Config(in_features=across, out_features=dim),
        o_gate=Linear.Config(in_features=dim, out_features=across),
        qk_norm=_norm_without_weight(config, width),
        scale_query_by=config.qk_scale_factor,
        use_rope=bool(config.layer_rope_theta[index]),
        rope=rope(config, width),
        window_size=window,
        inner_attention=ExactAttention.Config(window=window),
    )


def _centred_norm(config: Any, eps: float) -> RMSGainCenterNorm.Config:
    """Return a norm whose weights are how much more than 1 it multiplies by."""
    return RMSGainCenterNorm.Config(normalized_shape=config.hidden_size, eps=eps, gain_center=1.0)


def _norm_without_weight(config: Any, width: int) -> RMSNorm.Config:
    return RMSNorm.Config(normalized_shape=width, eps=config.rms_norm_eps, elementwise_affine=False)
