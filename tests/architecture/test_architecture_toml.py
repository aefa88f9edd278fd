"""Every TOML file of the repository parses, and every recipe is one that the app accepts."""

import importlib
import importlib.util
import tomllib

import pytest


def test_every_toml_file_parses(text_files):
    found = []
    for path in text_files:
        if path.suffix == ".toml":
            try:
                tomllib.loads(path.read_text(encoding="utf-8"))
            except tomllib.TOMLDecodeError as error:
                found.append(f"{path}: {error}")
    assert not found, "\n".join(found)


def test_every_recipe_loads(root):
    recipes = sorted((root / "configs").rglob("*.toml"))
    if not recipes and importlib.util.find_spec("cosmos_app.recipe") is None:
        pytest.skip("cosmos_app has no recipes yet")
    load_recipe = importlib.import_module("cosmos_app.recipe").load_recipe
    assert recipes, "configs/ holds no recipe"
    for recipe in recipes:
        load_recipe(recipe)
