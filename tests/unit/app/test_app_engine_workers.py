"""Workers of vLLM that cannot each have their part of a model are refused with the recipe."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from cosmos_algos import OnPolicyDistillationConfig
from cosmos_app.cli import main
from cosmos_app.engine_workers import require_workers
from cosmos_app.errors import DataError
from cosmos_app.prepare import check_inputs, config_of
from cosmos_app.quickstart.tiny_model import TinyModelConfig, build_tiny_model
from cosmos_app.recipe import ModelConfig, Recipe
from cosmos_app.teacher_config import TeacherConfig
from cosmos_rollout import TransformersConfig, VLLMConfig


def test_workers_have_as_many_heads_each(tmp_path: Path) -> None:
    config = {"model_type": "qwen3", "num_attention_heads": 6, "num_key_value_heads": 2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = config_of(tmp_path)
    for workers in (1, 2, 3, 6):
        require_workers("rollout.engine", VLLMConfig(tensor_parallel=workers), model)
    with pytest.raises(DataError) as refused:
        require_workers("rollout.engine", VLLMConfig(tensor_parallel=4), model)
    assert str(refused.value).startswith(
        "rollout.engine.tensor_parallel is 4, which does not divide the model's 6 attention heads"
    )


@pytest.mark.parametrize("kind", ["qwen3", "qwen2_vl"])
def test_each_stage_has_a_layer(tmp_path: Path, kind: str) -> None:
    layers = {"num_hidden_layers": 3}
    of_text = layers if kind == "qwen3" else {"text_config": layers}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind, **of_text}))
    model = config_of(tmp_path)
    for stages in (1, 2, 3):
        require_workers("rollout.engine", VLLMConfig(pipeline_parallel=stages), model)
    with pytest.raises(DataError) as refused:
        require_workers("rollout.engine", VLLMConfig(pipeline_parallel=4), model)
    assert str(refused.value).startswith(
        "rollout.engine.pipeline_parallel is 4, and the model has 3 layers: "
    )


def test_check_refuses_more_stages_than_layers_of_a_model_to_be_built(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text("model.tiny.num_layers = 1\n[rollout.engine]\nkind = 'vllm'\n")
    one, two = (["check", str(recipe), f"rollout.engine.pipeline_parallel={n}"] for n in (1, 2))
    assert CliRunner().invoke(main, one).exit_code == 0
    result = CliRunner().invoke(main, two)
    assert result.exit_code == 2
    said = " ".join(result.output.split())
    assert "rollout.engine.pipeline_parallel is 2, and the model has 1 layer: " in said


def test_who_tells_vllm_otherwise_is_believed() -> None:
    model = config_of(TinyModelConfig(num_heads=4, num_layers=2))
    require_workers("rollout.engine", TransformersConfig(), model)
    for extra in ({"tensor_parallel_size": 2}, {"hf_overrides": {"num_attention_heads": 6}}):
        require_workers("rollout.engine", VLLMConfig(tensor_parallel=3, extra=extra), model)
    for extra in ({"pipeline_parallel_size": 2}, {"hf_overrides": {"num_hidden_layers": 3}}):
        require_workers("rollout.engine", VLLMConfig(pipeline_parallel=3, extra=extra), model)


def test_the_engines_of_rollouts_and_teachers_are_looked_at(tmp_path: Path) -> None:
    tiny, wide = TinyModelConfig(num_heads=4), TinyModelConfig(num_heads=6, hidden_size=48)
    build_tiny_model(tmp_path / "teacher", ["0123456789+="], wide, 0)
    recipe = Recipe(model=ModelConfig(tiny=tiny, teacher=tmp_path / "teacher"))
    by_four = VLLMConfig(tensor_parallel=4)
    check_inputs(replace(recipe, rollout=replace(recipe.rollout, engine=by_four)))
    by_three = replace(recipe.rollout, engine=VLLMConfig(tensor_parallel=3))
    with pytest.raises(DataError, match=r"rollout\.engine\.tensor_parallel is 3.* 4 attention"):
        check_inputs(replace(recipe, rollout=by_three))
    stages = VLLMConfig(pipeline_parallel=9)
    learning = replace(
        recipe,
        algorithm=OnPolicyDistillationConfig(),
        teacher=TeacherConfig(replicas=1, engine=by_four),
    )
    with pytest.raises(DataError, match=r"teacher\.engine\.tensor_parallel is 4.* 6 attention"):
        check_inputs(learning)
    in_stages = replace(learning, teacher=replace(learning.teacher, engine=stages))
    with pytest.raises(DataError, match=r"teacher\.engine\.pipeline_parallel is 9"):
        check_inputs(in_stages)
