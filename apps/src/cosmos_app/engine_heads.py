"""Whether vLLM could divide a model's heads among as many workers as a recipe asks for."""

from typing import TYPE_CHECKING

from cosmos_app.errors import DataError
from cosmos_rollout import EngineConfig, VLLMConfig

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def require_heads(setting: str, engine: EngineConfig, model: "PretrainedConfig") -> None:
    """Check that vLLM's workers, ``tensor_parallel`` of them, can each have as many heads.

    Heads of keys and values may be fewer than the workers, which then share them. Not where vLLM is
    told of other heads or workers (``extra.hf_overrides``, ``extra.tensor_parallel_size``).

    Args:
        setting: what the engine is in the recipe.
        engine: what generates, or scores.
        model: its config.

    Raises:
        DataError: if vLLM would refuse to start.
    """
    if not isinstance(engine, VLLMConfig):
        return
    if engine.extra.keys() & {"hf_overrides", "tensor_parallel_size"}:
        return
    heads: object = getattr(model.get_text_config(), "num_attention_heads", None)
    workers = engine.tensor_parallel
    if isinstance(heads, int) and heads % workers:  # not where layers differ in them
        raise DataError(
            f"{setting}.tensor_parallel is {workers}, which does not divide the model's {heads} "
            "attention heads; vLLM would not start. Choose a divisor of them"
        )
