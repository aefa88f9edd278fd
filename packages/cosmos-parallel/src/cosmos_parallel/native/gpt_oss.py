"""GPT-OSS of torchtitan, with attention and experts that are exact in any precision.

Every head has a sink: a logit without a value that takes its part of the softmax (OpenAI, gpt-oss
model card, 2025, section 2.2). Its gradient needs the sum of the other exponentials, which no
kernel of torch hands out on all devices, so scores are spelled out here.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torchtitan.models.common import Linear
from torchtitan.models.common.attention import QKVLinear
from torchtitan.models.common.config_utils import make_router_config
from torchtitan.models.common.decoder import Decoder
from torchtitan.models.common.linear import ScaledBiasRowwiseLinear
from torchtitan.models.gpt_oss.model import Attention, GptOssModel, GptOssTransformerBlock
from torchtitan.models.gpt_oss.moe import (
    GptOssGroupedExperts,
    GptOssMoE,
    ScaleBiasForward,
    swiglu,
)
from torchtitan.protocols.module import Module

from cosmos_parallel.native.names import HfNames
from cosmos_parallel.native.pieces import UNUSED, norm, outside, rope, routed
from cosmos_parallel.sequences import Visibility, attend_where_seen, causal_mask

_ATTENTION = {
    f"model.layers.{{}}.self_attn.{letter}_proj.{part}": (
        f"layers.{{}}.attention.qkv_linear.w{letter}.{part}"
    )
    for letter in "qkv"
    for part in ("weight", "bias")
}
# torchtitan's own table names the packed files of 4 bits; these are those of plain ones
_NAMES = (
    _ATTENTION
    | {
        "model.embed_tokens.weight": "tok_embeddings.weight",
        "model.layers.{}.self_attn.o_proj.weight": "layers.{}.attention.wo.weight",
        "model.layers.{}.self_attn.o_proj.bias": "layers.{}.attention.wo.bias",
        "model.layers.{}.self_attn.sinks": "layers.{}.attention.sinks",
        "model.layers.{}.input_layernorm.weight": "layers.{}.attention_norm.weight",
        "model.layers.{}.post_attention_layernorm.weight": "layers.{}.ffn_norm.weight",
        "model.layers.{}.mlp.router.weight": "layers.{}.moe.router.gate.weight",
        "model.layers.{}.mlp.router.bias": "layers.{}.moe.router.gate.bias",
        "model.norm.weight": "norm.weight",
        "lm_head.weight": "lm_head.weight",
    }
    | {
        f"model.layers.{{}}.mlp.experts.{theirs}": (
            f"layers.{{}}.moe.routed_experts.inner_experts.{ours}"
        )
        for theirs, ours in {
            "gate_up_proj": "mlp1_weight_EGD",
            "gate_up_proj_bias": "mlp1_bias_EG",
            "down_proj": "mlp2_weight_EDF",
            "down_proj_bias": "mlp2_bias_ED",
        }.items()
    }
)
HF_NAMES = HfNames(
    _NAMES,
    # files have inputs before outputs
    transposed=frozenset(
        f"model.layers.{{}}.mlp.experts.{name}" for name in ("gate_up_proj", "down_proj")
    ),
)


class SinkAttention(Module):
    """Attention that hands out the logarithm of its sums, over a window if it has one."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        """What differs from layer to layer.

        Attributes:
            window: how many tokens a query sees; ``None`` for all before it.
        """

        window: int | None = None

    def __init__(self, config: Config) -> None:
        """Make it."""
        super().__init__()
        self._window = config.window

    def forward(  # noqa: PLR0913 - the interface of torchtitan
        self,
        q_BLNH: Tensor,  # noqa: N803 - torchtitan's sharding finds arguments by these names
        k_BLNH: Tensor,  # noqa: N803
        v_BLNH: Tensor,  # noqa: N803
        *,
        attention_masks: Visibility,
        scale: float,
        enable_gqa: bool,
        out_transform: Callable[[Tensor, Tensor], Tensor],
    ) -> Tensor:
        """Return what ``out_transform`` makes of the output ``[B, L, N, H]`` and its sums' log."""
        attend = partial(self._attend, scale=scale, out_transform=out_transform)
        return attend_where_seen(q_BLNH, k_BLNH, v_BLNH, attention_masks, self._window, attend)

    def _attend(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        mask: Tensor | None,
        *,
        scale: float,
        out_transform: Callable[[Tensor, Tensor], Tensor],
    ) -> Tensor:
        """Return [B, L, N, H] of [B, N, L, H]; without a mask, of whole samples."""
        if mask is None:
            mask = causal_mask(queries, self._window)
        num_keys = keys.shape[1]  # each is shared by a run of queries
        queries = queries.unflatten(1, (num_keys, -1))
        keys, values = keys.unsqueeze(2), values.unsqueeze(2)
        scores = queries @ keys.transpose(-1, -2)
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32)) * scale
        scores = scores.masked_fill(~mask.unsqueeze(-3), -torch.inf)
        out = scores.softmax(dim=-1).type_as(values) @ values
        sums = scores.logsumexp(dim=-1)
        return out_transform(out.flatten(1, 2).transpose(1, 2), sums.flatten(1, 2).transpose(1, 2))


class ExactClampedExperts(GptOssGroupedExperts):
    """Experts with clamped SwiGLU and biases that compute in the type of their weights."""

    @dataclass(kw_only=True, slots=True)
    class Config(GptOssGroupedExperts.Config):
        """As torchtitan's, and more.

        Attributes:
            swiglu_alpha: sigmoid gain of the gate.
        """

        swiglu_alpha: float = 1.702

    def __init__(self, config: Config) -> None:
        """Make them."""
        super().__init__(config)
        self._alpha = config.swiglu_alpha

    def forward(
        self,
        x_RD: Tensor,  # noqa: N803
        num_tokens_per_expert_E: Tensor,  # noqa: N803
    ) -> Tensor:
        """Run the tokens, sorted by expert, through their experts."""
        tp = _tensor_degree(self.mlp1_weight_EGD)
        up, up_bias, down, down_bias = (
            weight.to_local() if isinstance(weight, DTensor) else weight
            for weight in (
                self.mlp1_weight_EGD,
                self.mlp1_bias_EG,
                self.mlp2_weight_EDF,
                self.mlp2_bias_ED,
            )
        )
        ends = torch.cumsum(num_tokens_per_expert_E, dim=0, dtype=torch.int32)
        rows = x_RD.shape[0]
        places = torch.arange(rows, device=x_RD.device, dtype=torch.int32)
        expert = torch.searchsorted(ends, places, right=True)
        tokens = x_RD.to(up.dtype)
        hidden = self._grouped_mm(A=tokens, B_t=up.transpose(-2, -1), offs=ends) + _of_rows(
            up_bias, expert
        )
        hidden = swiglu(hidden, alpha=self._alpha, limit=self.swiglu_limit)
        out = self._grouped_mm(A=hidden, B_t=down.transpose(-2, -1), offs=ends)
        # ranks that have a part of the features each add theirs up, and the bias once
        return (out + ScaleBiasForward.apply(_of_rows(down_bias, expert), tp, out.dtype)).type_as(
            x_RD
        )


class ExactRowwiseLinear(ScaledBiasRowwiseLinear):
    """A split projection whose bias is added once and has its whole gradient on every rank.

    torchtitan's divides the gradient by the degree as well.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(ScaledBiasRowwiseLinear.Config):
        """As torchtitan's."""

    def forward(self, input: Tensor) -> Tensor:
        """Return this rank's summand of the output."""
        weight, bias = (
            part.to_local() if isinstance(part, DTensor) else part
            for part in (self.weight, self.bias)
        )
        return functional.linear(
            input, weight, ScaleBiasForward.apply(bias, self.tp_degree, bias.dtype)
        )


def _of_rows(bias: Tensor, expert: Tensor) -> Tensor:
    """Return the bias of each row's expert; rows behind the last expert are padding and have 0."""
    return torch.cat([bias, torch.zeros_like(bias[:1])])[expert]


def gpt_oss(config: Any) -> Decoder.Config:
    """Return torchtitan's config of a GPT-OSS model."""
    layers = [
        GptOssTransformerBlock.Config(
            attention_norm=norm(config),
            ffn_norm=norm(config),
            attention=_attention(
                config, config.sliding_window if kind == "sliding_attention" else None
            ),
            moe=_experts(config),
        )
        for kind in config.layer_types
    ]
    return GptOssModel.Config(**outside(config), layers=layers)


def _attention(config: Any, window: int | None) -> Attention.Config:
    width, dim = config.head_dim, config.hidden_size
    queries, keys = (
        Linear.Config(in_features=dim, out_features=num * width, bias=True)
        for num in (config.num_attention_heads, config.num_key_value_heads)
    )
    return Attention.Config(
        n_heads=config.num_attention_heads,
        n_kv_heads=config.num_key_value_heads,
        head_dim=width,
        dim=dim,
        qkv_linear=QKVLinear.Config(head_dim=width, wq=queries, wkv=keys),
        wo=ExactRowwiseLinear.Config(
            in_features=config.num_attention_heads * width, out_features=dim, bias=True
        ),
        sliding_window_size=window,
        inner_attention=SinkAttention.Config(window=window),
        rope=rope(config, width),
    )


def _experts(config: Any) -> GptOssMoE.Config:
    num_experts = config.num_local_experts
    return GptOssMoE.Config(
        num_experts=num_experts,
        load_balance_coeff=None,
        routed_experts=routed(
            config,
            ExactClampedExperts.Config(
                dim=config.hidden_size,
                hidden_dim=config.intermediate_size,
                num_experts=num_experts,
                swiglu_limit=config.swiglu_limit,
                swiglu_alpha=config.swiglu_alpha,
            ),
        ),
        router=make_router_config(
            dim=config.hidden_size,
            num_experts=num_experts,
            gate_param_init=UNUSED,
            top_k=config.num_experts_per_tok,
            score_func="softmax",
            route_norm=True,
            bias=True,
        ),
    )


def _tensor_degree(weight: Any) -> int:
    """Return among how many ranks the features of each expert are divided."""
    if not isinstance(weight, DTensor) or "tp" not in (weight.device_mesh.mesh_dim_names or ()):
        return 1
    return weight.device_mesh["tp"].size()
