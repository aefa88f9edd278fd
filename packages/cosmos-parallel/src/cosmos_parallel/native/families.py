"""From the config of a Hugging Face model to torchtitan's, family by family."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from torchtitan.models.common import Linear, RMSNorm
from torchtitan.models.common.attention import GQAttention, QKVLinear
from torchtitan.models.common.config_utils import make_moe_config, make_router_config
from torchtitan.models.common.decoder import Decoder
from torchtitan.models.common.moe import MoE
from torchtitan.models.deepseek_v3.model import (
    Attention,
    DeepSeekV3Model,
    DeepSeekV3TransformerBlock,
)
from torchtitan.models.deepseek_v3.state_dict_adapter import DeepSeekV3StateDictAdapter
from torchtitan.models.llama3.model import Llama3Model, Llama3TransformerBlock
from torchtitan.models.qwen3.model import Qwen3Model, Qwen3TransformerBlock
from torchtitan.models.qwen3.state_dict_adapter import Qwen3StateDictAdapter

from cosmos_parallel.native.attention import ExactAttention, PairsRoPE
from cosmos_parallel.native.gpt_oss import HF_NAMES, gpt_oss
from cosmos_parallel.native.muse_glimmer import muse_glimmer
from cosmos_parallel.native.muse_glimmer import names as muse_glimmer_names
from cosmos_parallel.native.names import HfNames
from cosmos_parallel.native.pieces import (
    UNUSED,
    feed_forward,
    frequencies,
    norm,
    outside,
    rope,
    routed,
    swiglu_experts,
)
from cosmos_parallel.native.without_fla import fla_or_its_names
from cosmos_parallel.rotary_axes import sees

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_INNER_EPS = 1e-6  # transformers' own for norms inside latent attention, whatever the config says
_BIASES = {
    f"model.layers.{{}}.self_attn.{q}_proj.bias": f"layers.{{}}.attention.qkv_linear.w{q}.bias"
    for q in "qkv"
}


def decoder_config(config: "PretrainedConfig") -> Decoder.Config:
    """Return torchtitan's config of the same model; it must pass ``native_refusal``."""
    text = config.get_text_config()
    return _BUILDERS[text.model_type](text)


def names_of(config: "PretrainedConfig", decoder: Decoder.Config) -> HfNames:
    """Return what files call the tensors of a model."""
    if config.model_type == "gpt_oss":
        return HF_NAMES
    if config.model_type == "muse_glimmer":
        return muse_glimmer_names(decoder)
    if config.model_type.startswith("qwen3_5"):
        with fla_or_its_names():
            from cosmos_parallel.native.qwen35 import hf_names
        return hf_names(sees=sees(config))
    if config.get_text_config().model_type == "deepseek_v3":
        table = _named(DeepSeekV3StateDictAdapter(decoder, None).from_hf_map)  # pyright: ignore
        return _kimi_named(table) if config.model_type == "kimi_k25" else table
    return _named(Qwen3StateDictAdapter(decoder, None).from_hf_map | _BIASES)  # pyright: ignore


def _named(table: Mapping[str, str | None]) -> HfNames:
    return HfNames({theirs: ours for theirs, ours in table.items() if ours is not None})


def _kimi_named(decoder: HfNames) -> HfNames:
    """Return names in a Kimi checkpoint, from those of the language model by itself."""
    return HfNames(
        {f"language_model.{theirs}": ours for theirs, ours in decoder.native.items()},
        carried=("vision_tower.", "mm_projector."),
    )


def _llama(config: Any) -> Decoder.Config:
    layers = [
        Llama3TransformerBlock.Config(
            attention_norm=norm(config),
            ffn_norm=norm(config),
            attention=_attention(config),
            feed_forward=feed_forward(config, config.intermediate_size),
        )
        for _ in range(config.num_hidden_layers)
    ]
    return Llama3Model.Config(**outside(config), layers=layers)


def _qwen(config: Any) -> Decoder.Config:
    mixture = config.model_type == "qwen3_moe"
    layers = [
        Qwen3TransformerBlock.Config(
            attention_norm=norm(config),
            ffn_norm=norm(config),
            attention=_attention(config),
            feed_forward=None if mixture else feed_forward(config, config.intermediate_size),
            moe=_qwen_experts(config) if mixture else None,
        )
        for _ in range(config.num_hidden_layers)
    ]
    return Qwen3Model.Config(**outside(config), layers=layers)


def _deepseek(config: Any) -> Decoder.Config:
    layers = [
        DeepSeekV3TransformerBlock.Config(
            attention_norm=norm(config),
            ffn_norm=norm(config),
            attention=_latent_attention(config),
            feed_forward=None
            if layer >= config.first_k_dense_replace
            else feed_forward(config, config.intermediate_size),
            moe=_deepseek_experts(config) if layer >= config.first_k_dense_replace else None,
        )
        for layer in range(config.num_hidden_layers)
    ]
    return DeepSeekV3Model.Config(**outside(config), layers=layers)


def _qwen35(config: Any) -> Decoder.Config:
    with fla_or_its_names():
        from cosmos_parallel.native.qwen35 import qwen35
    return qwen35(config)


_BUILDERS: dict[str, Callable[[Any], Decoder.Config]] = {
    "llama": _llama,
    "qwen2": _qwen,
    "qwen3": _qwen,
    "qwen3_moe": _qwen,
    "deepseek_v3": _deepseek,
    "gpt_oss": gpt_oss,
    "muse_glimmer_text": muse_glimmer,
    "qwen3_5_text": _qwen35,
    "qwen3_5_moe_text": _qwen35,
}


def _attention(config: Any) -> GQAttention.Config:
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    biased = config.model_type == "qwen2"
    queries, keys = (
        Linear.Config(in_features=config.hidden_size, out_features=num * width, bias=biased)
        for num in (config.num_attention_heads, config.num_key_value_heads)
    )
    return GQAttention.Config(
        n_heads=config.num_attention_heads,
        n_kv_heads=config.num_key_value_heads,
        head_dim=width,
        dim=config.hidden_size,
        qkv_linear=QKVLinear.Config(head_dim=width, wq=queries, wkv=keys),
        wo=Linear.Config(
            in_features=config.num_attention_heads * width, out_features=config.hidden_size
        ),
        qk_norm=norm(config, width) if config.model_type.startswith("qwen3") else None,
        inner_attention=ExactAttention.Config(),
        rope=rope(config, width),
    )


def _latent_attention(config: Any) -> Attention.Config:
    dim, rank = config.hidden_size, config.q_lora_rank or 0
    heads, nope, rope = config.num_attention_heads, config.qk_nope_head_dim, config.qk_rope_head_dim

    def linear(inputs: int, outputs: int) -> Linear.Config:
        return Linear.Config(in_features=inputs, out_features=outputs)

    return Attention.Config(
        dim=dim,
        n_heads=heads,
        q_lora_rank=rank,
        kv_lora_rank=config.kv_lora_rank,
        qk_nope_head_dim=nope,
        qk_rope_head_dim=rope,
        v_head_dim=config.v_head_dim,
        wq=None if rank else linear(dim, heads * (nope + rope)),
        wq_a=linear(dim, rank) if rank else None,
        wq_b=linear(rank, heads * (nope + rope)) if rank else None,
        q_norm=RMSNorm.Config(normalized_shape=rank or 1, eps=_INNER_EPS),
        wkv_a=linear(dim, config.kv_lora_rank + rope),
        kv_norm=RMSNorm.Config(normalized_shape=config.kv_lora_rank, eps=_INNER_EPS),
        wkv_b=linear(config.kv_lora_rank, heads * (nope + config.v_head_dim)),
        wo=linear(heads * config.v_head_dim, dim),
        inner_attention=ExactAttention.Config(),
        mscale=config.rope_parameters.get("mscale_all_dim", 0.0),
        rope=_rope_of_pairs(config),
    )


def _rope_of_pairs(config: Any) -> PairsRoPE.Config:
    """Return the rotary embedding of latent attention, with YaRN if the config has it.

    torchtitan's attention scales its scores by what YaRN says, if it is told of a factor.
    """
    width, parameters = config.qk_rope_head_dim, config.rope_parameters
    inv_freq, factor = frequencies(config, width)
    return PairsRoPE.Config(
        dim=width,
        max_seq_len=config.max_position_embeddings,
        inv_freq=inv_freq,
        factor=factor,
        scaling="yarn" if parameters["rope_type"] == "yarn" else "none",
        rope_factor=parameters.get("factor", 1.0),
    )


def _qwen_experts(config: Any) -> MoE.Config:
    return make_moe_config(
        num_experts=config.num_experts,
        router=make_router_config(
            dim=config.hidden_size,
            num_experts=config.num_experts,
            gate_param_init=UNUSED,
            top_k=config.num_experts_per_tok,
            score_func="softmax",
            route_norm=config.norm_topk_prob,
        ),
        routed_experts=routed(config, swiglu_experts(config, config.num_experts)),
        load_balance_coeff=None,
    )


def _deepseek_experts(config: Any) -> MoE.Config:
    groups = config.n_group if config.n_group > 1 else None
    return make_moe_config(
        num_experts=config.n_routed_experts,
        router=make_router_config(
            dim=config.hidden_size,
            num_experts=config.n_routed_experts,
            gate_param_init=UNUSED,
            top_k=config.num_experts_per_tok,
            score_func="sigmoid",
            route_norm=config.norm_topk_prob,
            route_scale=config.routed_scaling_factor,
            num_expert_groups=groups,
            num_limited_groups=config.topk_group if groups else None,
        ),
        routed_experts=routed(config, swiglu_experts(config, config.n_routed_experts)),
        shared_experts=feed_forward(config, config.moe_intermediate_size * config.n_shared_experts),
    )
