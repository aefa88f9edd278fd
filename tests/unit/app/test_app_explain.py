"""``cosmos-app explain``: every key of every recipe can be looked up."""

import json
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result
from jsonschema import Draft202012Validator

from cosmos_app.cli import main
from cosmos_app.looking_commands import explain
from cosmos_app.recipes import RECIPE_KINDS
from cosmos_core.config import describe_config, json_schema

CONFIGS = Path(__file__).parents[3] / "configs"
RECIPES = sorted(CONFIGS.rglob("*.toml"))


@cache
def validator(kind: str) -> Draft202012Validator:
    return Draft202012Validator(json_schema(RECIPE_KINDS[kind]))


def said(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["explain", *arguments])


def test_the_kinds_on_the_command_line_are_those_of_recipes() -> None:
    (kind,) = (one for one in explain.params if one.name == "kind")
    assert isinstance(kind.type, click.Choice)
    assert sorted(kind.type.choices) == sorted(RECIPE_KINDS)


def test_without_a_key_it_lists_the_tables() -> None:
    found = said()
    assert found.exit_code == 0
    assert "staleness" in found.output
    assert "how far sampling may run ahead" in found.output


def test_a_table_of_kinds_shows_them_and_the_keys_of_the_default_one() -> None:
    found = said("rollout.engine").output
    assert "vllm (default)" in found
    assert "context_length" in found
    assert "cosmos-app explain rollout.engine.transformers" in found


def test_a_key_is_told_with_type_default_and_how_it_is_written() -> None:
    found = said("staleness.bound").output
    assert "a whole number; default 4" in found
    assert "[staleness]\n  bound = 4" in found


def test_a_key_of_one_kind_says_so() -> None:
    assert 'where learner.optimizer.kind = "muon"' in said("learner.optimizer.muon.lr").output


def test_a_key_that_other_kinds_of_recipes_have_is_found_there() -> None:
    found = said("data.rows")
    assert found.exit_code == 0
    assert 'kind = "sft"' in found.output


@pytest.mark.parametrize(
    ("word", "path"),
    [
        ("lr", "learner.optimizer.lr"),  # the name
        ("slot", "rollout.slots"),  # a part of it
        ("DAPO dynamic sampling", "trainer.drop_zero_signal"),  # its text
    ],
)
def test_a_word_is_looked_for(word: str, path: str) -> None:
    found = said(word)
    assert found.exit_code == 0
    assert path in found.output


def test_what_is_nowhere_is_an_error_with_the_nearest_key() -> None:
    found = said("staleness.boundd")
    assert found.exit_code == 2
    assert "did you mean staleness.bound?" in found.output
    assert said("staleness", "--kind", "sft").exit_code == 2


def test_as_json() -> None:
    found: dict[str, Any] = json.loads(said("staleness", "--json").output)
    assert found["kind"] == "rl"
    assert found["tables"][0]["keys"][0]["path"] == "staleness.depth"


@pytest.mark.parametrize("kind", RECIPE_KINDS)
def test_every_key_says_what_it_is(kind: str) -> None:
    keys = describe_config(RECIPE_KINDS[kind])
    silent = {key.path for key in keys if not key.doc and not key.path.endswith("kind")}
    assert not silent, f"no entry under 'Attributes:' for {sorted(silent)}"


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_the_schema_takes_every_recipe(path: Path) -> None:
    recipe = tomllib.loads(path.read_text())
    validator(recipe.get("kind", "rl")).validate(recipe)


@pytest.mark.parametrize(
    "wrong",
    [
        {"nonsense": 1},
        {"staleness": {"boundd": 1}},
        {"trainer": {"steps": "8"}},
        {"rollout": {"engine": {"kind": "vlm"}}},
        {"reward": {"rewards": [{"pattern": "x"}]}},
        {"algorithm": {"kind": "grpo", "aggregation": 3}},
    ],
)
def test_the_schema_refuses_what_the_loader_refuses(wrong: dict[str, Any]) -> None:
    recipe = tomllib.loads((CONFIGS / "quickstart.toml").read_text())
    assert validator("rl").is_valid(recipe)
    assert not validator("rl").is_valid(recipe | wrong)


def test_the_schema_is_printed_for_a_file() -> None:
    schema = json.loads(said("--schema", "--kind", "wfm_rl").output)
    Draft202012Validator.check_schema(schema)
    assert schema == json_schema(RECIPE_KINDS["wfm_rl"])
