"""A context that vLLM would refuse to serve a model with is refused with the recipe."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from cosmos_app.context_length import require_context
from cosmos_app.errors import DataError
from cosmos_app.prepare import check_inputs
from cosmos_app.quickstart.tiny_model import TinyModelConfig, build_tiny_model
from cosmos_app.recipe import ModelConfig, Recipe
from cosmos_rollout import TransformersConfig, VLLMConfig


def write_config(folder: Path, **changes) -> Path:
    file = folder / "config.json"
    found = json.loads(file.read_text()) if file.exists() else {"model_type": "qwen3"}
    folder.mkdir(exist_ok=True)
    file.write_text(json.dumps(found | {"max_position_embeddings": 512} | changes))
    return folder


def refusal(engine, model: Path) -> str:
    with pytest.raises(DataError) as refused:
        require_context("rollout.engine", engine, model)
    return str(refused.value)


def test_a_context_longer_than_a_models_positions_is_refused(tmp_path: Path) -> None:
    model = write_config(tmp_path / "model")
    require_context("rollout.engine", VLLMConfig(context_length=512), model)
    require_context("rollout.engine", VLLMConfig(), model)  # as long as the model's own
    require_context("rollout.engine", TransformersConfig(), model)
    said = refusal(VLLMConfig(context_length=513), model)
    assert "rollout.engine.context_length is 513, and the model was made for 512 tokens" in said


def test_a_scaling_of_positions_counts(tmp_path: Path) -> None:
    linear = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}
    model = write_config(tmp_path / "model", rope_parameters=linear)
    require_context("rollout.engine", VLLMConfig(context_length=1024), model)
    assert "was made for 1024 tokens" in refusal(VLLMConfig(context_length=1025), model)


def test_who_tells_vllm_otherwise_is_believed(tmp_path: Path, monkeypatch) -> None:
    model = write_config(tmp_path / "model")
    extra = {"hf_overrides": {"rope_parameters": {"rope_type": "linear", "factor": 4.0}}}
    require_context("rollout.engine", VLLMConfig(context_length=2048, extra=extra), model)
    monkeypatch.setenv("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "1")
    require_context("rollout.engine", VLLMConfig(context_length=2048), model)


def test_a_recipe_is_checked_with_the_model_that_it_names(tmp_path: Path) -> None:
    build_tiny_model(tmp_path / "model", ["0123456789+="], TinyModelConfig(), 0)
    model = write_config(tmp_path / "model")
    recipe = Recipe(model=ModelConfig(path=model))
    check_inputs(recipe)
    longer = replace(recipe.rollout, engine=VLLMConfig(context_length=4096))
    with pytest.raises(DataError, match="context_length is 4096"):
        check_inputs(replace(recipe, rollout=longer))
    with pytest.raises(DataError, match=r"made for 256 tokens.* or model\.tiny\.max_position"):
        check_inputs(Recipe(rollout=longer))
