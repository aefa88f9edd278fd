"""Prompts that the engine of a recipe could not serve are told before anything is started."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Literal

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


def recipe_of(
    model: Path,
    data: Path,
    engine,
    prompts: list[str],
    too_long: Literal["refuse", "drop"] = "drop",
) -> Recipe:
    rows = [{"prompt": prompt, "answer": "1"} for prompt in prompts]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = Recipe(model=ModelConfig(path=model), data=DataConfig(path=data, too_long=too_long))
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


def test_a_file_with_a_prompt_that_is_too_long_is_refused_unless_such_are_to_be_dropped(
    model: Path, tmp_path: Path
) -> None:
    """However far down it is, and however many rows before it are not looked at."""
    data = tmp_path / "rows.jsonl"
    prompts = ["1+1="] * 1000
    prompts[700] = "1" * 120
    engine = TransformersConfig(context_length=100)
    said = (
        f"data file {data}: rollout.engine cannot serve 1 of the 268 prompts looked at, "
        "which {}, such as row 701: the prompt has 121 tokens, a context of 100 leaves room for "
        "99 at most"
    )
    dropped = said.format("will be dropped")
    assert check_inputs(recipe_of(model, data, engine, prompts)) == (dropped,)
    what_to_do = "; raise rollout.engine.context_length, take them out, or have them dropped by"
    with pytest.raises(DataError, match=re.escape(said.format("are too long") + what_to_do)):
        check_inputs(recipe_of(model, data, engine, prompts, "refuse"))


def test_a_prompt_of_tokens_that_there_are_not_is_dropped_however_long_prompts_may_be(
    model: Path, tmp_path: Path
) -> None:
    prompts = ["99", "1+1="]
    recipe = recipe_of(
        model, tmp_path / "r.jsonl", ScriptedConfig(vocabulary_size=16), prompts, "refuse"
    )
    (warning,) = check_inputs(recipe)
    assert "which will be dropped" in warning


@pytest.mark.parametrize("engine", [EndpointConfig(url="http://localhost:1/v1", model="theirs")])
def test_what_only_a_server_knows_is_left_to_it(engine, model: Path, tmp_path: Path) -> None:
    assert check_inputs(recipe_of(model, tmp_path / "rows.jsonl", engine, ["1" * 300])) == ()


@pytest.mark.parametrize("setting", ["rollout.sampling.top_p", "validation.top_p"])
def test_nucleus_sampling_is_refused_where_the_engine_would_refuse_every_prompt(setting) -> None:
    overrides = ["rollout.engine={kind='sglang'}", f"{setting}=0.9"]
    with pytest.raises(ConfigError, match=rf"{setting} is 0\.9 and rollout\.engine\.kind 'sglang'"):
        load_recipe(SUMS, overrides)
