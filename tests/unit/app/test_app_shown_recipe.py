"""What is kept and sent of a recipe holds no password."""

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from rich.console import Console

from cosmos_app.cli import main
from cosmos_app.frame import open_run
from cosmos_app.recipe import BusConfig, Recipe, load_recipe
from cosmos_app.recipes import load_any_recipe
from cosmos_app.shown_recipe import print_recipe, shown_as_json, shown_recipe
from cosmos_app.wfm.running import load_wfm_recipe
from cosmos_core.config import config_from_json, config_to_json, load_config
from cosmos_core.metrics import JsonlSinkConfig, MlflowSinkConfig

CONFIGS = Path(__file__).parents[3] / "configs"
QUICKSTART = CONFIGS / "quickstart.toml"
SD3 = CONFIGS / "wfm" / "sd3_sft_mock.toml"
URL = "rediss://user:p4ssword@redis:6379/2"
SHOWN = "rediss://user:***@redis:6379/2"


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    recipe = load_recipe(QUICKSTART)
    return replace(recipe, output=tmp_path / "run", bus=BusConfig(url=URL))


@pytest.mark.parametrize("resume", [False, True])
def test_the_configuration_of_a_run_is_its_recipe_but_for_the_password(
    recipe: Recipe, resume: bool
) -> None:
    open_run(recipe, Console(quiet=True), resume=False).close()
    with open_run(recipe, Console(quiet=True), resume=resume) as run:
        text = run.config.read_text()
    kept = replace(recipe, output=run.path, bus=BusConfig(url=SHOWN))
    assert replace(config_from_json(Recipe, text), output=run.path) == kept


def test_what_sinks_are_told_of_a_recipe_without_a_server_of_its_own_is_all(recipe: Recipe) -> None:
    assert shown_recipe(recipe)["bus"]["url"] == SHOWN
    assert shown_recipe(replace(recipe, bus=BusConfig()))["bus"]["url"] is None


def test_the_password_of_a_tracking_server_is_neither_kept_nor_sent_on(recipe: Recipe) -> None:
    sinks = (JsonlSinkConfig(), MlflowSinkConfig(uri="https://user:p4ssword@mlflow/api"))
    shown = shown_recipe(replace(recipe, sinks=sinks))
    assert shown["sinks"][1]["uri"] == "https://user:***@mlflow/api"
    assert "p4ssword" not in json.dumps(shown)


def test_what_is_kept_of_a_world_models_recipe_has_no_password(tmp_path: Path) -> None:
    uri = "loggers=[{kind='mlflow', uri='https://user:p4ssword@mlflow/api'}]"
    recipe = load_wfm_recipe(SD3, [uri])
    assert "p4ssword" in config_to_json(recipe)
    assert "https://user:***@mlflow/api" in shown_as_json(recipe)
    assert "p4ssword" not in shown_as_json(recipe)


def test_a_check_shows_no_password() -> None:
    result = CliRunner().invoke(main, ["check", str(QUICKSTART), f"bus.url={json.dumps(URL)}"])
    assert result.exit_code == 0, result.output
    assert SHOWN in result.output
    assert "p4ssword" not in result.output


@pytest.mark.parametrize(
    "path", sorted(CONFIGS.rglob("*.toml")), ids=lambda path: str(path.relative_to(CONFIGS))
)
def test_the_keys_that_check_prints_make_the_same_recipe_of_an_empty_one(path: Path) -> None:
    recipe = load_any_recipe(path)
    console = Console(record=True, file=io.StringIO(), width=60)
    print_recipe(console, recipe, whole=False)
    *overrides, left = console.export_text().splitlines()
    assert load_config(type(recipe), {}, overrides) == recipe
    assert left.endswith("other keys have their defaults: --all shows them")
