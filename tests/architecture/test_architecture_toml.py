"""Every TOML file of the repository parses, and every recipe is one that the app accepts."""

import tomllib

from cosmos_app.recipes import load_any_recipe


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
    assert recipes, "configs/ holds no recipe"
    for recipe in recipes:
        load_any_recipe(recipe)
