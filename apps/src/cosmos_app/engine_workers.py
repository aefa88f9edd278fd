"""Whether vLLM could divide a model among as many workers as a recipe asks for."""

from typing import TYPE_CHECKING

from cosmos_app.errors import DataError
from cosmos_rollout import EngineConfig, VLLMConfig

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def require_workers(setting: str, engine: EngineConfig, model: "PretrainedConfig") -> None:
    """Check that each of vLLM's workers can have as many heads, and a layer at least.

    ``tensor_parallel`` of them divide the heads. Those of keys and values may be fewer, which
    workers then share. ``pipeline_parallel`` of them divide the layers. Neither is looked at where
    vLLM is told of another model or of other workers (``extra.hf_overrides``,
    ``extra.tensor_parallel_size``, ``extra.pipeline_parallel_size``).

    Args:
        setting: what the engine is in the recipe.
        engine: what generates, or scores.
        model: its config.

    Raises:
        DataError: if vLLM would refuse to start, or workers would have nothing to compute.
    """
    if not isinstance(engine, VLLMConfig) or "hf_overrides" in engine.extra:
        return
    text = model.get_text_config()
    if "tensor_parallel_size" not in engine.extra:
        _require_heads(setting, engine.tensor_parallel, getattr(text, "num_attention_heads", None))
    if "pipeline_parallel_size" not in engine.extra:
        _require_layers(setting, engine.pipeline_parallel, getattr(text, "num_hidden_layers", None))


def _require_heads(setting: str, workers: int, heads: object) -> None:
    if isinstance(heads, int) and heads % workers:  # not where layers differ in them
        raise DataError(
            f"{setting}.tensor_parallel is {workers}, which does not divide the model's {heads} "
            "attention heads; vLLM would not start. Choose a divisor of them"
        )


def _require_layers(setting: str, stages: int, layers: object) -> None:
    if isinstance(layers, int) and stages > layers:
        raise DataError(
            f"{setting}.pipeline_parallel is {stages}, and the model has {layers} "
            f"layer{'s' * (layers != 1)}: stages without one would compute nothing. Choose as many "
            "stages as there are layers, or fewer"
        )
