"""The rows of the pairwise sweep hold every pair, and each is a recipe."""

import itertools
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[3] / "benchmarks"))

import pairs_given
import pairs_rl
import pairs_wfm
from pairs_cover import covering_rows, is_wrong

from cosmos_app.recipes import load_any_recipe

ROOT = Path(__file__).resolve().parents[3]
FACTORS = {"a": ("1", "2", "3"), "b": ("1", "2"), "c": ("1", "2", "3", "4"), "d": ("1", "2")}
CONFLICTS = (
    {"a": frozenset(("1",)), "b": frozenset(("2",))},
    {"a": frozenset(("2",)), "c": frozenset(("4",)), "d": frozenset(("1",))},
)


def test_each_pair_that_goes_together_is_in_a_row_and_no_row_has_a_conflict() -> None:
    rows = list(covering_rows(FACTORS, CONFLICTS, seed=0))
    held = {pair for row in rows for pair in itertools.combinations(sorted(row.items()), 2)}
    wanted = {
        ((one, x), (other, y))
        for one, other in itertools.combinations(FACTORS, 2)
        for x in FACTORS[one]
        for y in FACTORS[other]
        if (x, y) != ("1", "2") or (one, other) != ("a", "b")
    }
    assert held == wanted
    assert not any(is_wrong(row, CONFLICTS) for row in rows)
    assert 12 <= len(rows) <= 16  # 3 x 4 at least
    assert rows == list(covering_rows(FACTORS, CONFLICTS, seed=0))


@pytest.mark.parametrize("sweep", [pairs_rl, pairs_given, pairs_wfm])
def test_every_level_is_of_a_recipe_beside_some_others(sweep, tmp_path: Path) -> None:
    factors = {factor: tuple(levels) for factor, levels in sweep.LEVELS.items()}
    for row in itertools.islice(covering_rows(factors, sweep.CONFLICTS, seed=0), 12):
        load_any_recipe(ROOT / sweep.recipe_of(row), sweep.overrides_of(row, tmp_path))
