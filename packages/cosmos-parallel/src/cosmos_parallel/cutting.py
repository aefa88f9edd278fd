"""Which models of transformers can be cut into pipeline stages, by their configs alone.

A decoder that says which of its modules make a pipeline embeds, runs its layers one after the other
and norms. Where more than that goes from layer to layer, or from the entry past layers, a stage
would miss it.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from cosmos_parallel.mesh import ParallelConfig
from cosmos_parallel.rotary_axes import COUNTING_TYPES, ROTARY_TYPES

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# they say so, and do not: layers share keys and values, what they look at or several streams of
# hidden states, run several times, or were not seen to be right
_NOT_CUT = frozenset(
    {
        "cohere_compass_text",
        "deepseek_v4",
        "diffusion_gemma",
        "gemma3n_text",
        "gemma4_text",
        "gemma4_unified_text",
        "glm_moe_dsa",
        "hrm_text",
        "hy_v4",
        "longcat_flash",
        "mistral4",
        "phi4_multimodal",
    }
)
# decoders that do not say so, and are built as those of another type
_BUILT_AS = {"qwen3_vl_text": "qwen3"}
# tokens of a picture see each other both ways, by a mask that only the first stage would make
_MASKS_BY_PICTURES = frozenset({"gemma3"})


def pipeline_modules(settings: Any) -> tuple[str, ...]:
    """Return the names of what makes a pipeline in a decoder, in order; none where it says nothing.

    Args:
        settings: the decoder's config, or its class.
    """
    from transformers import CONFIG_MAPPING

    kind: str = getattr(settings, "model_type", "")
    said = getattr(settings, "base_model_pp_plan", None)
    if said is None and kind in _BUILT_AS:
        said = CONFIG_MAPPING[_BUILT_AS[kind]].base_model_pp_plan
    return tuple(said or ())


def may_be_cut(settings: Any, model_type: str, *, is_text: bool) -> bool:
    """Whether transformers' implementation can be cut into stages.

    Args:
        settings: of the decoder, or its class.
        model_type: of the whole model.
        is_text: whether the whole is a decoder of text.
    """
    if not _is_of_layers(settings):
        return False
    return is_text or model_type in (ROTARY_TYPES | COUNTING_TYPES) - _MASKS_BY_PICTURES


def layers_alone(config: "PretrainedConfig") -> bool:
    """Whether hidden states of a decoder are seen by its layers and its norm alone."""
    return _is_of_layers(config.get_text_config()) and not _num_entered(config)


def _is_of_layers(settings: Any) -> bool:
    """Whether a decoder says that its layers alone work on hidden states, and they do."""
    return bool(pipeline_modules(settings)) and settings.model_type not in _NOT_CUT


def _num_entered(config: "PretrainedConfig") -> int:
    """Return how many layers what is seen enters, besides the embedding."""
    vision: Any = getattr(config, "vision_config", None)
    return len(getattr(vision, "deepstack_visual_indexes", None) or ())


def uncuttable(config: "PretrainedConfig", parallel: ParallelConfig) -> Iterator[str]:
    """Yield what keeps a model of transformers from being cut into so many stages."""
    settings: Any = config.get_text_config()
    if getattr(config, "quantization_config", None) is not None:
        yield f"pp {parallel.pp} does not divide weights of few bits"
    seen_by = _num_entered(config)
    first = -(-settings.num_hidden_layers // parallel.num_stages)
    if seen_by > first:
        yield (
            f"what it sees enters its first {seen_by} layers, and the first of "
            f"{parallel.num_stages} stages would have {first} of them"
        )
