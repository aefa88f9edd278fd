"""Which models have which implementation and which parallel axes, and what a layout asks of one.

Everything here is decided from a model's config alone, before any process starts.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal

from cosmos_parallel.cutting import may_be_cut, uncuttable
from cosmos_parallel.errors import MeshError
from cosmos_parallel.mesh import ParallelConfig
from cosmos_parallel.packed_attention import state_layers
from cosmos_parallel.rotary_axes import COUNTING_TYPES, ROTARY_TYPES, sees

if TYPE_CHECKING:
    from transformers import PretrainedConfig

Implementation = Literal["auto", "native", "transformers"]
NATIVE_TYPES: Mapping[str, str] = {
    "llama": "Llama 2, Llama 3",
    "qwen2": "Qwen2, Qwen2.5",
    "qwen3": "Qwen3",
    "qwen3_moe": "Qwen3-MoE",
    "deepseek_v3": "DeepSeek-V3, Moonlight-MoE",
    "gpt_oss": "GPT-OSS",
    "kimi_k25": "Kimi K2.5 to K2.7 (images with transformers)",
    "muse_glimmer": "Muse Glimmer (images with transformers)",
    "qwen3_5": "Qwen3.5 (images with transformers)",
    "qwen3_5_text": "Qwen3.5, its language model",
    "qwen3_5_moe": "Qwen3.5-MoE (images with transformers)",
    "qwen3_5_moe_text": "Qwen3.5-MoE, its language model",
}
_MIXTURES = ("qwen3_moe", "deepseek_v3", "gpt_oss", "kimi_k25", "qwen3_5_moe", "qwen3_5_moe_text")
# the language model inside one that sees
_DECODERS = {
    "kimi_k25": "deepseek_v3",
    "muse_glimmer": "muse_glimmer_text",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
}
# they have layers that look back over a window
_WINDOWED = ("gpt_oss", "muse_glimmer_text")
_TENSOR_STYLES = {
    "colwise",
    "colwise_gather_output",
    "embedding_rowwise",
    "rowwise",
    "rowwise_split_input",
    "replicated_with_grad_allreduce",
    "mla_kv_a_proj",
    "moe_tp_experts",
    "moe_identity_expert",
    "all_reduce",
    "packed_colwise",
    "packed_rowwise",
}
# their plans were not seen to be right: it denoises blocks of text and is no causal model
_PLANS_NOT_SEEN = frozenset({"diffusion_gemma"})
# what plans get wrong: Inkling's experts hold gate and up one after the other, not in turn
_MENDED = {"inkling_text": {"layers.*.mlp.experts.gate_up_proj": "packed_colwise"}}
# decoders without a plan, which are built as those of another type
_BUILT_AS = {"qwen3_vl_text": "qwen3"}
# they take any attention function, and have no plan for pipelines that would say so
_BY_ANY_ATTENTION = frozenset(
    {
        "biogpt",
        "bitnet",
        "diffllama",
        "gpt2",
        "gpt_bigcode",
        "granitemoe",
        "granitemoe_swa",
        "granitemoeshared",
        "hunyuan_v1_dense",
        "hunyuan_v1_moe",
        "jetmoe",
        "modernbert-decoder",
        "nanochat",
        "olmoe",
        "opt",
        "persimmon",
        "phimoe",
    }
)
_FIXED_ROPE = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSupport:
    """How one model type can be trained.

    Attributes:
        model_type: as in ``config.json``.
        families: what people call the models of this type.
        native: whether torchtitan's implementation is there.
        axes: degrees that may be above 1.
    """

    model_type: str
    families: str
    native: bool
    axes: tuple[str, ...]


def native_refusal(config: "PretrainedConfig") -> str | None:
    """Return why torchtitan's implementation does not compute this model; ``None`` if it does."""
    settings: Any = config.get_text_config()
    kind: str = settings.model_type
    if config.model_type not in NATIVE_TYPES:
        return f"model type {config.model_type} is none of {', '.join(NATIVE_TYPES)}"
    if kind != _DECODERS.get(config.model_type, config.model_type):
        return f"its language model is of type {kind}"
    if find_spec("triton") is None:
        return "triton, which it imports, is not installed (there is one for Linux only)"
    rope = (getattr(settings, "rope_parameters", None) or {}).get("rope_type", "default")
    allowed = ("default", "yarn") if kind == "deepseek_v3" else _FIXED_ROPE
    sliding = "sliding_attention" in (getattr(settings, "layer_types", None) or ())
    biased = bool(getattr(settings, "attention_bias", False))
    activation: str = getattr(settings, "hidden_act", None) or settings.hidden_activation
    found = {
        f"rope type {rope}": rope not in allowed,
        f"activation {activation}": activation != "silu",
        "biases in attention": biased and kind != "gpt_oss",
        "no biases in attention": kind == "gpt_oss" and not biased,
        "biases in the feed-forward": bool(getattr(settings, "mlp_bias", False)),
        "sliding-window attention": sliding and kind not in _WINDOWED,
        "weights of few bits": any(
            getattr(part, "quantization_config", None) is not None for part in (config, settings)
        ),
        "one matrix for embedding and output head": sees(config)
        and is_tied(config)
        and not (kind.startswith("qwen3_5") and _ties_throughout(config)),
        "layers without experts between those with": kind == "qwen3_moe"
        and (settings.decoder_sparse_step != 1 or bool(settings.mlp_only_layers)),
        "layers with rotary bases of their own": _has_other_bases(settings),
        "rotary embedding on halves": kind == "deepseek_v3"
        and not getattr(settings, "rope_interleave", True),
    }
    reasons = [reason for reason, applies in found.items() if applies]
    return f"it has {', '.join(reasons)}" if reasons else None


def _has_other_bases(settings: Any) -> bool:
    """Whether layers that turn do so by another base than that of all; 0 is for none that turns."""
    bases = set(getattr(settings, "layer_rope_theta", None) or ()) - {0}
    return bool(bases) and bases != {settings.rope_parameters["rope_theta"]}


def choose_implementation(
    config: "PretrainedConfig", parallel: ParallelConfig, wanted: Implementation
) -> Literal["native", "transformers"]:
    """Return which implementation a model is loaded with.

    ``auto`` is that of transformers, unless an axis is asked for that only torchtitan's has. Under
    ``tp``, ``cp`` and ``pp`` it is torchtitan's for a model that does not see: pictures need
    transformers'.

    Raises:
        MeshError: if torchtitan's is wanted or needed and does not compute this model.
    """
    needing = [axis for axis in ("pp", "ep", "tp", "cp") if getattr(parallel, axis) > 1]
    if needing:
        of_words = not sees(config) and not (parallel.pp > 1 and is_tied(config))
        if wanted == "auto" and of_words and native_refusal(config) is None:
            return "native"
        there = generic_axes(config)
        needing = [axis for axis in needing if axis not in there]
    if wanted == "transformers" and needing:
        why = "transformers is asked for (adapters, 8-bit products and frozen parts ask for it)"
        raise MeshError(_needs_native(config, parallel, needing, why))
    if wanted != "native" and not needing:
        return "transformers"
    refusal = native_refusal(config)
    if refusal is not None:
        raise MeshError(_needs_native(config, parallel, needing, refusal))
    return "native"


def _needs_native(
    config: "PretrainedConfig", parallel: ParallelConfig, needing: list[str], why: str
) -> str:
    axes = ", ".join(f"{axis} {getattr(parallel, axis)}" for axis in needing) or "native"
    others = ", ".join(generic_axes(config))
    return (
        f"{axes} needs torchtitan's implementation, but {why}; "
        f"a {config.model_type} model of transformers can have {others}"
    )


def generic_axes(config: "PretrainedConfig") -> tuple[str, ...]:
    """Return the axes that transformers' implementation of a model can have."""
    text = config.get_text_config()
    return _axes_of(text, config.model_type, is_text=text is config)


def _axes_of(settings: Any, model_type: str, *, is_text: bool) -> tuple[str, ...]:
    """Read axes off what a config, or its class, says of its decoder.

    ``tp`` needs a plan of the model's own in which every style is known here; ``pp`` see
    `cosmos_parallel.cutting`; ``cp`` rotary axes,
    or a decoder of text whose layers all attend, by any function: that it says which of its modules
    make a pipeline is a sign of it. It may be that of a model that sees and counts as text does.
    """
    axes = ["dp_replicate", "dp_shard"]
    styles = set((tensor_plan(settings) or {"": "none"}).values())
    says_parts = getattr(settings, "base_model_pp_plan", None) is not None
    has_sight = "vision_config" in getattr(settings, "sub_configs", ())
    may_divide = (says_parts or settings.model_type in _BY_ANY_ATTENTION) and (
        (is_text and not has_sight) or model_type in COUNTING_TYPES
    )
    if (may_divide and _attends_only(settings)) or model_type in ROTARY_TYPES:
        axes.append("cp")
    if styles <= _TENSOR_STYLES and model_type not in _PLANS_NOT_SEEN:
        axes.append("tp")
    if may_be_cut(settings, model_type, is_text=is_text and not has_sight):
        axes.append("pp")
    return tuple(axes)


def _attends_only(settings: Any) -> bool:
    """Whether no layer carries a state along the sequence, which ends where a rank's stretch does.

    Args:
        settings: of the decoder, or its class, of which the default is asked.
    """
    if isinstance(settings, type) and hasattr(settings, "layer_types"):
        settings = _default(settings)
    return not state_layers(settings)


def _default(kind: type[Any]) -> Any:
    """Return a config with nothing set."""
    from transformers.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity_error()  # tokens beyond a default vocabulary are no news
    try:
        return kind()
    finally:
        logging.set_verbosity(level)


def tensor_plan(settings: Any) -> Mapping[str, str]:
    """Return how the matrices of a decoder are split, by patterns of their names within it.

    Args:
        settings: the decoder's config, or its class.
    """
    from transformers import CONFIG_MAPPING

    plan = getattr(settings, "base_model_tp_plan", None)
    kind: str = getattr(settings, "model_type", "")
    if plan is None and kind in _BUILT_AS:
        plan = CONFIG_MAPPING[_BUILT_AS[kind]].base_model_tp_plan
    return (plan or {}) | _MENDED.get(kind, {})


def supported_models() -> list[ModelSupport]:
    """Return every model type that can be trained, torchtitan's first, then by name.

    A native one can be had from transformers as well; its axes are all that one of them has.
    """
    from transformers import CONFIG_MAPPING, AutoConfig
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    )

    found = [
        ModelSupport(model_type=kind, families=families, native=True, axes=native_axes(kind))
        for kind, families in NATIVE_TYPES.items()
    ]
    sighted = set(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)
    for kind in sorted({*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *sighted} - NATIVE_TYPES.keys()):
        text = getattr(CONFIG_MAPPING[kind], "sub_configs", {}).get("text_config")
        if text is AutoConfig:  # of any type; what it is by default
            text = type(_default(CONFIG_MAPPING[kind]).get_text_config())
        axes = _axes_of(text or CONFIG_MAPPING[kind], kind, is_text=text is None)
        seeing = " (with images)" if kind in sighted else ""
        found.append(
            ModelSupport(model_type=kind, families=f"{kind}{seeing}", native=False, axes=axes)
        )
    return found


def native_axes(model_type: str) -> tuple[str, ...]:
    """Return the axes that torchtitan's implementation of a model type can have."""
    dense = ("dp_replicate", "dp_shard", "cp", "tp", "pp")
    return (*dense, "ep") if model_type in _MIXTURES else dense


def check_layout(
    config: "PretrainedConfig",
    parallel: ParallelConfig,
    world_size: int,
    *,
    implementation: Implementation = "auto",
) -> ParallelConfig:
    """Return resolved degrees that a model can be trained with on so many ranks.

    Raises:
        MeshError: saying which degree does not divide which number of the model or of the ranks.
    """
    resolved = parallel.resolve(world_size)
    chosen = choose_implementation(config, resolved, implementation)
    problems = list(_problems(config, resolved))
    if chosen == "native":
        problems += _refused_by_titan(config, resolved)
    if chosen == "transformers" and resolved.pp > 1:
        problems += uncuttable(config, resolved)
    if problems:
        raise MeshError(f"{config.model_type} model: {'; '.join(problems)}")
    return resolved


def _problems(config: "PretrainedConfig", parallel: ParallelConfig) -> Iterator[str]:
    settings: Any = config.get_text_config()
    num_experts = _num_experts(settings)
    if parallel.ep > 1 and not num_experts:
        yield f"ep {parallel.ep} needs a mixture of experts, and this model has none"
    elif num_experts and num_experts % parallel.ep:
        yield f"ep {parallel.ep} does not divide its {num_experts} experts"
    layers = settings.num_hidden_layers
    if parallel.num_stages > layers:
        yield (
            f"pp {parallel.pp} with schedule {parallel.pp_schedule} makes {parallel.num_stages} "
            f"stages, more than its {layers} layers"
        )
    if parallel.tp > 1:
        yield from _undivided(settings, parallel.tp, experts_split=parallel.ep == 1)


def _undivided(settings: Any, tp: int, *, experts_split: bool) -> Iterator[str]:
    divided = {
        "num_attention_heads": "attention heads",
        "num_key_value_heads": "key-value heads",
        "intermediate_size": "feed-forward features",
    }
    if experts_split:
        divided["moe_intermediate_size"] = "features of an expert"
    yield from _not_dividing(settings, tp, divided)


def _refused_by_titan(config: "PretrainedConfig", parallel: ParallelConfig) -> Iterator[str]:
    """Yield what transformers' implementation does not split, or gathers again, or copies."""
    if parallel.pp > 1 and is_tied(config):
        yield (
            f"pp {parallel.pp} puts embedding and output head on different ranks, and torchtitan's "
            "implementation does not have one matrix on both"
        )
    if parallel.tp == 1:
        return
    divided = {
        "linear_num_key_heads": "key heads of linear attention",
        "linear_num_value_heads": "value heads of linear attention",
        "shared_expert_intermediate_size": "features of the shared expert",
    }
    yield from _not_dividing(config.get_text_config(), parallel.tp, divided)


def _not_dividing(settings: Any, tp: int, divided: Mapping[str, str]) -> Iterator[str]:
    for name, meaning in divided.items():
        numbers = {getattr(layer, name, None) or 0 for layer in layer_configs(settings)}
        for number in sorted(number for number in numbers if number % tp):
            yield f"tp {tp} does not divide its {number} {meaning}"


def is_tied(config: Any) -> bool:
    """Whether the input embedding is the output head too; some decoders leave it to the whole.

    Args:
        config: any Hugging Face configuration.
    """
    parts = (config.get_text_config(), config)
    return any(getattr(part, "tie_word_embeddings", False) for part in parts)


def _ties_throughout(config: Any) -> bool:
    """Whether the whole and its language model both say so; by default the two may disagree."""
    return bool(config.tie_word_embeddings and config.get_text_config().tie_word_embeddings)


def layer_configs(settings: Any) -> Sequence[Any]:
    """Return the config of each layer of a decoder whose layers differ, or else that of all."""
    differ: bool = getattr(settings, "is_heterogeneous", False)
    return list(settings.per_layer_config) if differ else [settings]


def _num_experts(settings: Any) -> int:
    for name in ("num_experts", "n_routed_experts", "num_local_experts"):
        number = getattr(settings, name, None)
        if isinstance(number, int) and number:
            return number
    return 0
