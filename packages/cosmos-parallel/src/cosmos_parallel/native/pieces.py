"""Pieces of torchtitan's configs that families have in common."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torchtitan.models.common import Embedding, Linear, RMSNorm
from torchtitan.models.common.config_utils import make_ffn_config
from torchtitan.models.common.feed_forward import FeedForward
from torchtitan.models.common.moe import GroupedExperts, RoutedExperts
from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher

from cosmos_parallel.native.attention import ExactExperts, HalvesRoPE

# Every tensor is read from a file; torchtitan asks for the names all the same.
UNUSED: dict[str, Callable[..., Any]] = {}


class PaddedEmbedding(Embedding):
    """An embedding whose row of the padding token gets no gradient, as in transformers.

    A model's embedding and head may be one parameter: as a row of the head it is trained.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Embedding.Config):
        """torchtitan's, and the token."""

        padding_token: int

    def __init__(self, config: Config) -> None:
        """Make it; not by ``padding_idx``, which would be a row of each part that ranks have."""
        super().__init__(config)
        self._padding_token = config.padding_token

    def forward(self, input: Tensor) -> Tensor:
        """Return rows ``[B, T, D]`` of tokens ``[B, T]``, or this rank's part of their sum."""
        rows = super().forward(input)
        return torch.where((input == self._padding_token)[..., None], rows.detach(), rows)


def embedding(config: Any) -> Embedding.Config:
    """Return the embedding of tokens; of a config without a padding token all rows are trained."""
    sizes = {"num_embeddings": config.vocab_size, "embedding_dim": config.hidden_size}
    token = config.pad_token_id
    if token is None:
        return Embedding.Config(**sizes)
    return PaddedEmbedding.Config(**sizes, padding_token=token % config.vocab_size)


def outside(config: Any) -> dict[str, Any]:
    """Return what every decoder has around its layers."""
    return {
        "dim": config.hidden_size,
        "vocab_size": config.vocab_size,
        "enable_weight_tying": bool(config.tie_word_embeddings),
        "tok_embeddings": embedding(config),
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
