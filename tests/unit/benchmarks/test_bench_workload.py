"""The tasks of the RL benchmark: one warmed model each, made once and found again."""

import dataclasses
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[3] / "benchmarks"))

from workload import TASKS, prepare_workload, read_rows

from cosmos_app.recipe import load_recipe


@pytest.mark.parametrize("name", sorted(TASKS))
def test_a_workload_is_made_once_and_another_one_is_not_taken_for_it(name, tmp_path):
    recipe = load_recipe(TASKS[name].recipe)
    warmup = dataclasses.replace(recipe.warmup, steps=2, batch_size=4)
    sampling = dataclasses.replace(recipe.rollout.sampling, max_new_tokens=2)
    rollout = dataclasses.replace(recipe.rollout, sampling=sampling)
    recipe = dataclasses.replace(recipe, warmup=warmup, rollout=rollout)
    made = prepare_workload(tmp_path / "workload", recipe)
    assert (made.model / "model.safetensors").exists()
    assert 0 <= made.accuracy <= 1
    written = made.train.stat().st_mtime_ns
    assert prepare_workload(tmp_path / "workload", recipe) == made
    assert made.train.stat().st_mtime_ns == written
    assert read_rows(made.held_out)
    with pytest.raises(ValueError, match="remove it"):
        prepare_workload(tmp_path / "workload", dataclasses.replace(recipe, seed=1))
