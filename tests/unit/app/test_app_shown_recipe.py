"""What is kept and sent of a recipe holds no password."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from rich.console import Console

from cosmos_app.cli import main
from cosmos_app.frame import open_run
from cosmos_app.recipe import BusConfig, Recipe, load_recipe
from cosmos_app.shown_recipe import shown_recipe
from cosmos_core.config import config_from_json

QUICKSTART = Path(__file__).parents[3] / "configs" / "quickstart.toml"
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


def test_a_check_shows_no_password() -> None:
    result = CliRunner().invoke(main, ["check", str(QUICKSTART), f"bus.url={json.dumps(URL)}"])
    assert result.exit_code == 0, result.output
    assert SHOWN in result.output
    assert "p4ssword" not in result.output
