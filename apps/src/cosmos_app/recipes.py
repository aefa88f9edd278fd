"""Which kind of run a recipe is: ``"rl"``, which need not be said, on given data, or of wfm."""

import json
import tomllib
from collections.abc import Sequence
from pathlib import Path

from cosmos_app.given.recipe import GIVEN_KINDS, GivenRecipe
from cosmos_app.recipe import Recipe, load_recipe
from cosmos_app.wfm.recipe import WFM_KINDS, WfmRecipe
from cosmos_core.config import config_from_json, load_config
from cosmos_core.rundir import RunDirectory

TokenRecipe = Recipe | GivenRecipe
AnyRecipe = TokenRecipe | WfmRecipe
RECIPE_KINDS: dict[str, type[AnyRecipe]] = {"rl": Recipe, **GIVEN_KINDS, **WFM_KINDS}


def load_any_recipe(path: Path, overrides: Sequence[str] = ()) -> AnyRecipe:
    """Read a recipe of any kind.

    Raises:
        ConfigError: if the file or an override is not a recipe, with every problem in it.
    """
    kind = _kind_of(path)
    if isinstance(kind, str) and kind in GIVEN_KINDS:
        return load_config(GIVEN_KINDS[kind], path, overrides)
    if isinstance(kind, str) and kind in WFM_KINDS:
        return load_config(WFM_KINDS[kind], path, overrides)
    return load_recipe(path, overrides)


def _kind_of(path: Path) -> object:
    """Return what a recipe, or the resolved one of a run, says it is; errors are for the loader."""
    try:
        text = path.read_text(encoding="utf-8-sig")
        tables = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except (OSError, ValueError):
        return None
    return tables.get("kind") if isinstance(tables, dict) else None


def recipe_of_run(run: RunDirectory) -> TokenRecipe:
    """Read the recipe that a run directory holds.

    Raises:
        ConfigError: if it is not one of this version.
    """
    text = run.config.read_text(encoding="utf-8")
    return config_from_json(GIVEN_KINDS.get(json.loads(text).get("kind"), Recipe), text)
