"""Whether vLLM would let a model have as long a context as a recipe asks for."""

import os
from pathlib import Path

from cosmos_app.errors import DataError
from cosmos_app.quickstart.tiny_model import TinyModelConfig
from cosmos_rollout import EngineConfig, VLLMConfig, longest_context

_ALLOWING = "VLLM_ALLOW_LONG_MAX_MODEL_LEN"


def require_context(setting: str, engine: EngineConfig, model: Path | TinyModelConfig) -> None:
    """Check that a model was made for the context that vLLM is to serve it with.

    Not where vLLM is told of other positions (``extra.hf_overrides``), or by its own environment
    variable not to look.

    Args:
        setting: what the engine is in the recipe.
        engine: what generates, or scores.
        model: its directory, or what is built.

    Raises:
        DataError: if vLLM would refuse to start.
    """
    if not isinstance(engine, VLLMConfig) or not engine.context_length:
        return
    if engine.extra.keys() & {"hf_overrides", "max_model_len"} or os.environ.get(_ALLOWING) == "1":
        return
    if isinstance(model, TinyModelConfig):
        longest, raising = model.max_position, "model.tiny.max_position"
    else:
        longest, raising = longest_context(model), f"a scaling by {setting}.extra.hf_overrides"
    if longest is not None and engine.context_length > longest:
        raise DataError(
            f"{setting}.context_length is {engine.context_length}, and the model was made for "
            f"{longest} tokens, any scaling of positions included; vLLM would not start. Set "
            f"{longest} or less, or {raising}"
        )
