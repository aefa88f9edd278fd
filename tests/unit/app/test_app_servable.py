"""Prompts that the engine of a recipe could not serve are told before anything is started."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from real_runs import SUMS

from cosmos_app.data_config import DataConfig
from cosmos_app.errors import DataError
from cosmos_app.prepare import check_inputs
from cosmos_app.quickstart.tiny_model import TinyModelConfig, build_tiny_model
from cosmos_app.recipe import ModelConfig, Recipe, load_recipe
from cosmos_core.config import ConfigError
from cosmos_rollout import EndpointConfig, ScriptedConfig, TransformersConfig


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Each text begins with token 1; "+" is 4, digits are 5 to 14, "=" is 16, of 18."""
    folder = tmp_path_factory.mktemp("made") / "model"
    build_tiny_model(folder, ["0123456789+=<>"], TinyModelConfig(), 0)
    return folder


def recipe_of(model: Path, data: Path, engine, prompts: list[str]) -> Recipe:
    rows = [{"prompt": prompt, "answer": "1"} for prompt in prompts]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = Recipe(model=ModelConfig(path=model), data=DataConfig(path=data))
    return replace(recipe, rollout=replace(recipe.rollout, engine=engine))


@pytest.mark.parametrize(
    ("engine", "prompts", "words"),
    [
        (
            ScriptedConfig(vocabulary_size=16),
            ["99", "1+1=", "5"],
            "row 2: prompt token 16 is outside the vocabulary 0..15",
        ),
        (
            TransformersConfig(context_length=4),
            ["99", "5", "111"],  # with the token that begins it, four
            "row 3: the prompt has 4 tokens, a context of 4 leaves room for 3 at most",
        ),
        (
            TransformersConfig(),  # as long as the model's own, 256
            ["99", "5", "1" * 255],
            "row 3: the prompt has 256 tokens, a context of 256 leaves room for 255 at most",
        ),
    ],
)
def test_some_prompts_that_cannot_be_served_are_a_warning_and_all_of_them_an_error(
    engine, prompts: list[str], words: str, model: Path, tmp_path: Path
) -> None:
    data = tmp_path / "rows.jsonl"
    assert check_inputs(recipe_of(model, data, engine, prompts)) == (
        f"data file {data}: rollout.engine cannot serve 1 of the 3 prompts looked at, which will "
        f"be dropped, such as {words}",
    )
    bad = [prompt for prompt in prompts if len(prompt) > 2]
    with pytest.raises(DataError, match=r"cannot serve any of the 1 prompts looked at, such as"):
        check_inputs(recipe_of(model, data, engine, bad))


@pytest.mark.parametrize("engine", [EndpointConfig(url="http://localhost:1/v1", model="theirs")])
def test_what_only_a_server_knows_is_left_to_it(engine, model: Path, tmp_path: Path) -> None:
    assert check_inputs(recipe_of(model, tmp_path / "rows.jsonl", engine, ["1" * 300])) == ()


@pytest.mark.parametrize("setting", ["rollout.sampling.top_p", "validation.top_p"])
def test_nucleus_sampling_is_refused_where_the_engine_would_refuse_every_prompt(setting) -> None:
    overrides = ["rollout.engine={kind='sglang'}", f"{setting}=0.9"]
    with pytest.raises(ConfigError, match=rf"{setting} is 0\.9 and rollout\.engine\.kind 'sglang'"):
        load_recipe(SUMS, overrides)
