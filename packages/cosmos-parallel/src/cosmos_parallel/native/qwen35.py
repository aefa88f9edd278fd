"""Qwen3.5 of torchtitan, in words alone: most layers carry a state, every few of them attend.

Imported inside `fla_or_its_names`. What samples of a row or a batch must not see of each other is
told to both kinds of layers: to those that attend by a mask, to the others by offsets, and, where
ranks share rows, by what of them is a rank's own.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

from torch import Tensor
from torch.distributed.tensor import DTensor
from torchtitan.models.common import Conv1d, Linear, SigmoidGatedFeedForward
from torchtitan.models.common.attention import (
    VarlenMetadata,
    create_varlen_metadata_for_document,
)
from torchtitan.models.common.config_utils import make_moe_config, make_router_config
from torchtitan.models.common.decoder import Decoder
from torchtitan.models.common.moe import MoE
from torchtitan.models.qwen3_5 import qwen3_5_configs
from torchtitan.models.qwen3_5.model import (
    GatedDeltaKernel,
    GatedDeltaNet,
    OffsetRMSNorm,
    Qwen35Attention,
    Qwen35Model,
    Qwen35TransformerBlock,
    RMSNormGated,
)

from cosmos_parallel.native.attention import ExactAttention
from cosmos_parallel.native.delta_rule import (
    apart,
    causal_convolution,
    gated_delta_rule,
    together,
)
from cosmos_parallel.native.divided_states import (
    Stretch,
    convolve_stretch,
    delta_rule_of_stretch,
)
from cosmos_parallel.native.names import HfNames, Joined
from cosmos_parallel.native.pieces import (
    UNUSED,
    feed_forward,
    outside,
    rope,
    routed,
    swiglu_experts,
)
from cosmos_parallel.native.without_fla import has_fla
from cosmos_parallel.sequences import Visibility

_LAYER = "layers.{}"
_EXPERTS = f"{_LAYER}.moe.routed_experts.inner_experts"
_IN_LAYERS = (
    {f"self_attn.{each}_proj.weight": f"attn.w{each}.weight" for each in "qkvo"}
    | {f"self_attn.{each}_norm.weight": f"attn.{each}_norm.weight" for each in "qk"}
    | {f"linear_attn.in_proj_{each}.weight": f"attn.in_proj_{each}.weight" for each in "zab"}
    | {f"linear_attn.{each}": f"attn.{each}" for each in ("A_log", "dt_bias")}
    | {f"linear_attn.{each}.weight": f"attn.{each}.weight" for each in ("norm", "out_proj")}
    | {
        "input_layernorm.weight": "attention_norm.weight",
        "post_attention_layernorm.weight": "ffn_norm.weight",
        "mlp.gate.weight": "moe.router.gate.weight",
        "mlp.shared_expert_gate.weight": "moe.shared_experts.gate.weight",
        # as published, with gate and up joined, and as transformers writes what it made itself
        "mlp.experts.down_proj": "moe.routed_experts.inner_experts.w2_EDF",
        "mlp.experts.{}.gate_proj.weight": "moe.routed_experts.inner_experts.w1_EFD",
        "mlp.experts.{}.up_proj.weight": "moe.routed_experts.inner_experts.w3_EFD",
        "mlp.experts.{}.down_proj.weight": "moe.routed_experts.inner_experts.w2_EDF",
    }
    | {
        f"mlp.{theirs}{projection}_proj.weight": f"{ours}.{matrix}.weight"
        for theirs, ours in (("", "feed_forward"), ("shared_expert.", "moe.shared_experts"))
        for projection, matrix in (("gate", "w1"), ("up", "w3"), ("down", "w2"))
    }
)


def hf_names(*, sees: bool) -> HfNames:
    """Return what files call the tensors, of the whole model or of a language model by itself."""
    decoder = "model.language_model" if sees else "model"
    of_layers = {
        f"{decoder}.{_LAYER}.{theirs}": f"{_LAYER}.{ours}" for theirs, ours in _IN_LAYERS.items()
    }
    state = f"{decoder}.{_LAYER}.linear_attn"
    return HfNames(
        of_layers
        | {
            f"{decoder}.embed_tokens.weight": "tok_embeddings.weight",
            f"{decoder}.norm.weight": "norm.weight",
            "lm_head.weight": "lm_head.weight",
        },
        carried=("model.visual.",) if sees else (),
        joined={
            f"{state}.in_proj_qkv.weight": Joined(
                tuple(f"{_LAYER}.attn.in_proj_{each}.weight" for each in "qkv"), dim=0
            ),
            f"{state}.conv1d.weight": Joined(
                tuple(f"{_LAYER}.attn.conv_{each}.weight" for each in "qkv"), dim=0
            ),
            f"{decoder}.{_LAYER}.mlp.experts.gate_up_proj": Joined(
                (f"{_EXPERTS}.w1_EFD", f"{_EXPERTS}.w3_EFD"), dim=1
            ),
        },
    )


class Samples(NamedTuple):
    """What layers with a state are told of the rows that they get.

    Attributes:
        offsets: where samples begin, in all rows one after the other.
        stretch: the same of a rank that shares its rows with others; ``None`` for whole rows.
    """

    offsets: VarlenMetadata
    stretch: Stretch | None


class DeltaKernel(GatedDeltaKernel):
    """fla's kernel on GPUs that have it, and torch's own operations everywhere else.

    Attributes:
        stretch: what this rank has of the rows of the pass under way, if they are shared.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(GatedDeltaKernel.Config):
        """As torchtitan's."""

    def __init__(self, config: Config) -> None:
        """Look whether there is fla."""
        super().__init__(config)
        self._has_fla = has_fla()
        self.stretch: Stretch | None = None

    def forward(  # noqa: PLR0913 - the interface of torchtitan
        self,
        xq_BLNK: Tensor,  # noqa: N803 - torchtitan's sharding finds arguments by these names
        xk_BLNK: Tensor,  # noqa: N803
        xv_BLNV: Tensor,  # noqa: N803
        g_BLN: Tensor,  # noqa: N803
        beta_BLN: Tensor,  # noqa: N803
        *,
        cu_seqlens: Tensor | None = None,
        cu_seqlens_cpu: Tensor | None = None,
    ) -> Tensor:
        """Return ``[1, L, N, V]`` from what a state is asked, keyed, given, and forgets."""
        if self.stretch is None and xv_BLNV.is_cuda and self._has_fla:
            return super().forward(
                xq_BLNK,
                xk_BLNK,
                xv_BLNV,
                g_BLN,
                beta_BLN,
                cu_seqlens=cu_seqlens,
                cu_seqlens_cpu=cu_seqlens_cpu,
            )
        shared_by = xv_BLNV.shape[2] // xq_BLNK.shape[2]
        sequences = (
            xq_BLNK.repeat_interleave(shared_by, dim=2),
            xk_BLNK.repeat_interleave(shared_by, dim=2),
            xv_BLNV,
            g_BLN,
            beta_BLN,
        )
        if self.stretch is not None:
            return delta_rule_of_stretch(self.stretch, *sequences)
        offsets = _offsets(cu_seqlens_cpu)
        return together(gated_delta_rule(*apart(offsets, *sequences)), offsets)


class DeltaNet(GatedDeltaNet):
    """torchtitan's, with a convolution on every device, and with rows that ranks share."""

    @dataclass(kw_only=True, slots=True)
    class Config(GatedDeltaNet.Config):
        """As torchtitan's."""

    def __init__(self, config: Config) -> None:
        """Make it."""
        super().__init__(config)
        self._stretch: Stretch | None = None

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        x_BLD: Tensor,  # noqa: N803
        attention_masks: Samples,
    ) -> Tensor:
        """Return ``[B, L, D]`` of rows of samples."""
        kernel = cast("DeltaKernel", self.kernel)
        self._stretch = kernel.stretch = attention_masks.stretch
        return super().forward(x_BLD, attention_masks.offsets)

    def _causal_conv(
        self,
        x_BLD: Tensor,  # noqa: N803
        conv: Any,
        cu_seqlens: Tensor | None = None,
        cu_seqlens_cpu: Tensor | None = None,
    ) -> Tensor:
        stretch = self._stretch
        if stretch is None and x_BLD.is_cuda and has_fla():
            return super()._causal_conv(x_BLD, conv, cu_seqlens, cu_seqlens_cpu)

        def convolve(sequence: Tensor, weight: Tensor) -> Tensor:
            if stretch is not None:
                return convolve_stretch(sequence, weight, stretch)
            offsets = _offsets(cu_seqlens_cpu)
            (samples,) = apart(offsets, sequence)
            return together(causal_convolution(samples, weight), offsets)

        if isinstance(x_BLD, DTensor):
            return self._local_map_conv(x_BLD, conv, convolve)
        return convolve(x_BLD, conv.weight)


class Words(Qwen35Model):
    """torchtitan's model without the part that sees."""

    @dataclass(kw_only=True, slots=True)
    class Config(Qwen35Model.Config):
        """As torchtitan's."""

    def __init__(self, config: Config) -> None:
        """Make the decoder."""
        super().__init__(config)
        self.vision_encoder = None

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, tokens: Tensor, positions: Tensor, attention_masks: Visibility
    ) -> Any:
        """Return hidden states.

        Args:
            tokens: ``[B, T]``, or what the stage before returned.
            positions: ``[B, T]``; 0 where a sample begins.
            attention_masks: what tokens see where a layer attends.
        """
        starts = positions.clone()
        starts[:, 0] = 0
        shared = attention_masks.group is not None
        samples = Samples(
            create_varlen_metadata_for_document(starts, include_host_offsets=True),
            Stretch.of(positions, attention_masks) if shared else None,
        )
        return super().forward(
            tokens,
            positions=positions,
            attention_masks=cast(
                "Any", {"quadratic_attention": attention_masks, "deltanet": samples}
            ),
            special_tokens={"image_id": -1, "video_id": -1},
        )


def qwen35(config: Any) -> Decoder.Config:
    """Return torchtitan's config of a language model of transformers."""
    mixture = config.model_type == "qwen3_5_moe_text"
    layers = [
        Qwen35TransformerBlock.Config(
            attention=_attention(config) if kind == "full_attention" else None,
            delta_net=_delta_net(config) if kind == "linear_attention" else None,
            feed_forward=None if mixture else feed_forward(config, config.intermediate_size),
            moe=_experts(config) if mixture else None,
            attention_norm=_norm(config, config.hidden_size),
            ffn_norm=_norm(config, config.hidden_size),
        )
        for kind in cast("Sequence[str]", config.layer_types)
    ]
    around: dict[str, Any] = outside(config) | {"norm": _norm(config, config.hidden_size)}
    # torchtitan asks what the part that sees would be like
    unused = qwen3_5_configs["debugmodel"]("flex").vision_encoder
    return Words.Config(**around, layers=layers, vision_encoder=unused)


def _norm(config: Any, width: int) -> OffsetRMSNorm.Config:
    return OffsetRMSNorm.Config(dim=width, eps=config.rms_norm_eps)


def _linear(inputs: int, outputs: int) -> Linear.Config:
    return Linear.Config(in_features=inputs, out_features=outputs)


def _attention(config: Any) -> Qwen35Attention.Config:
    dim, width = config.hidden_size, config.head_dim
    rotary = int(width * config.rope_parameters["partial_rotary_factor"])
    heads, groups = config.num_attention_heads, config.num_key_value_heads
    return Qwen35Attention.Config(
        n_heads=heads,
        n_kv_heads=groups,
        head_dim=width,
        rotary_dim=rotary,
        rope=cast("Any", rope(config, rotary)),  # one axis of positions, where words are alone
        wq=_linear(dim, heads * width * 2),  # and a gate
        wk=_linear(dim, groups * width),
        wv=_linear(dim, groups * width),
        wo=_linear(heads * width, dim),
        q_norm=_norm(config, width),
        k_norm=_norm(config, width),
        inner_attention=ExactAttention.Config(),
    )


def _delta_net(config: Any) -> GatedDeltaNet.Config:
    dim, num_states = config.hidden_size, config.linear_num_value_heads
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    values = num_states * config.linear_value_head_dim

    def convolution(channels: int) -> Conv1d.Config:
        return Conv1d.Config(
            in_channels=channels,
            out_channels=channels,
            kernel_size=config.linear_conv_kernel_dim,
            groups=channels,
            bias=False,
        )

    return DeltaNet.Config(
        key_head_dim=config.linear_key_head_dim,
        value_head_dim=config.linear_value_head_dim,
        conv_kernel_size=config.linear_conv_kernel_dim,
        in_proj_q=_linear(dim, keys),
        in_proj_k=_linear(dim, keys),
        in_proj_v=_linear(dim, values),
        in_proj_z=_linear(dim, values),
        in_proj_a=_linear(dim, num_states),
        in_proj_b=_linear(dim, num_states),
        conv_q=convolution(keys),
        conv_k=convolution(keys),
        conv_v=convolution(values),
        kernel=DeltaKernel.Config(),
        norm=RMSNormGated.Config(dim=config.linear_value_head_dim, eps=config.rms_norm_eps),
        out_proj=_linear(values, dim),
    )


def _experts(config: Any) -> MoE.Config:
    shared = feed_forward(config, config.shared_expert_intermediate_size)
    return make_moe_config(
        num_experts=config.num_experts,
        router=make_router_config(
            dim=config.hidden_size,
            num_experts=config.num_experts,
            gate_param_init=UNUSED,
            top_k=config.num_experts_per_tok,
            score_func="softmax",
            route_norm=True,
        ),
        routed_experts=routed(config, swiglu_experts(config, config.num_experts)),
        shared_experts=SigmoidGatedFeedForward.Config(
            w1=shared.w1, w2=shared.w2, w3=shared.w3, gate=_linear(config.hidden_size, 1)
        ),
        load_balance_coeff=None,
    )


def _offsets(on_host: Tensor | None) -> list[int]:
    assert on_host is not None, "samples have to be told apart"
    return on_host.tolist()
