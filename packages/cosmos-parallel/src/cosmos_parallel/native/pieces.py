"""Pieces of torchtitan's configs that families have in common."""

from collections.abc import Callable
from typing import Any

import torch
from torchtitan.models.common import Embedding, Linear, RMSNorm
from torchtitan.models.common.config_utils import make_ffn_config
from torchtitan.models.common.feed_forward import FeedForward
from torchtitan.models.common.moe import GroupedExperts, RoutedExperts
from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher

from cosmos_parallel.native.attention import ExactExperts, HalvesRoPE

# Every tensor is read from a file; torchtitan asks for the names all the same.
UNUSED: dict[str, Callable[..., Any]] = {}


def outside(config: Any) -> dict[str, Any]:
    """Return what every decoder has around its layers."""
    return {
        "dim": config.hidden_size,
        "vocab_size": config.vocab_size,
        "enable_weight_tying": bool(config.tie_word_embeddings),
        "tok_embeddings": Embedding.Config(
            num_embeddings=config.vocab_size, embedding_dim=config.hidden_size
        ),
        "norm": norm(config),
        "lm_head": Linear.Config(in_features=config.hidden_size, out_features=config.vocab_size),
    }


def norm(config: Any, width: int | None = None) -> RMSNorm.Config:
    """Return a norm over the hidden size, or over ``width``."""
    return RMSNorm.Config(normalized_shape=width or config.hidden_size, eps=config.rms_norm_eps)


def rope(config: Any, width: int) -> HalvesRoPE.Config:
    """Return the rotary embedding of heads of ``width``, with whatever scaling the config has."""
    inv_freq, factor = frequencies(config, width)
    return HalvesRoPE.Config(
        dim=width, max_seq_len=config.max_position_embeddings, inv_freq=inv_freq, factor=factor
    )


def frequencies(config: Any, width: int) -> tuple[tuple[float, ...], float]:
    """Return frequencies of a rotary embedding of ``width``, and a factor on cosine and sine."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    kind = config.rope_parameters["rope_type"]
    if kind == "default":
        steps = torch.arange(0, width, 2, dtype=torch.float32) / width
        inv_freq, factor = 1.0 / config.rope_parameters["rope_theta"] ** steps, 1.0
    else:
        inv_freq, factor = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    return tuple(inv_freq.tolist()), float(factor)


def feed_forward(config: Any, hidden: int) -> FeedForward.Config:
    """Return a SwiGLU feed-forward, ``hidden`` wide inside."""
    return make_ffn_config(
        dim=config.hidden_size, hidden_dim=hidden, w1_param_init=UNUSED, w2w3_param_init=UNUSED
    )


def swiglu_experts(config: Any, num_experts: int) -> ExactExperts.Config:
    """Return experts by themselves."""
    return ExactExperts.Config(
        dim=config.hidden_size,
        hidden_dim=config.moe_intermediate_size,
        num_experts=num_experts,
    )


def routed(config: Any, experts: GroupedExperts.Config) -> RoutedExperts.Config:
    """Return experts with what brings tokens to them and back."""
    return RoutedExperts.Config(
        inner_experts=experts,
        token_dispatcher=AllToAllTokenDispatcher.Config(
            num_experts=experts.num_experts, top_k=config.num_experts_per_tok
        ),
    )
