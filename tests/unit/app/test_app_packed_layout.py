"""``check`` refuses rows of several samples where the model would not tell them apart."""

from pathlib import Path

import pytest

from cosmos_app.check import check_recipe, require_layout
from cosmos_app.given.check import check_given
from cosmos_app.given.recipe import SftRecipe
from cosmos_app.recipe import Recipe
from cosmos_core.config import load_config
from cosmos_parallel import PackingError

ROOT = Path(__file__).parents[3]
EAGER = "model.training.attention=eager"


def test_packed_rows_and_an_attention_without_samples_are_refused_by_check() -> None:
    packed = ["trainer.layout=packed", EAGER]
    recipe = load_config(Recipe, ROOT / "configs" / "quickstart.toml", packed)
    with pytest.raises(PackingError, match=r"eager.*attention sdpa, or use the padded layout"):
        check_recipe(recipe, as_json=True)
    rows = f"data.path={ROOT / 'configs' / 'data' / 'sums.jsonl'}"
    given = load_config(SftRecipe, ROOT / "configs" / "sft.toml", [rows, EAGER])
    with pytest.raises(PackingError, match="eager"):
        check_given(given, as_json=True)


@pytest.mark.parametrize(
    "changes",
    [
        ["trainer.layout=padded", EAGER],
        ["trainer.layout=auto", EAGER],  # which is padded then
        ["trainer.layout=packed"],
        ["trainer.layout=packed", EAGER, "policy.ranks=2", "policy.parallel.cp=2"],  # has its own
        ["trainer.layout=packed", EAGER, "model.training.implementation=native"],
    ],
)
def test_what_tells_samples_apart_or_has_none_in_a_row_is_taken(changes: list[str]) -> None:
    recipe = load_config(Recipe, ROOT / "configs" / "quickstart.toml", changes)
    require_layout(recipe, recipe.trainer.layout)
