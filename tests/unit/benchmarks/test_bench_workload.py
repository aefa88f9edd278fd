"""The tasks of the RL benchmark: answers that are right, and one warmed model found again."""

import dataclasses
import sys
from itertools import accumulate
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[3] / "benchmarks"))

from chains import ChainConfig, chain_rows
from workload import TASKS, prepare_workload, read_rows

from cosmos_app.recipe import load_recipe


def test_a_chain_names_every_running_total_and_most_are_short():
    train, held_out = chain_rows(ChainConfig(rows=500, held_out=50), seed=3)
    assert (len(train), len(held_out)) == (500, 50)
    assert len({row["prompt"] for row in train + held_out}) == 550
    for row in train + held_out:
        terms = [int(term) for term in row["prompt"].removesuffix("=").split("+")]
        assert [int(total) for total in row["answer"].split(".")] == list(accumulate(terms))[1:]
    lengths = sorted(len(row["answer"]) for row in train)
    assert lengths[-1] > 4 * lengths[len(lengths) // 2]


@pytest.mark.parametrize("name", sorted(TASKS))
def test_a_workload_is_made_once_and_another_one_is_not_taken_for_it(name, tmp_path):
    recipe = load_recipe(TASKS[name].recipe)
    warmup = dataclasses.replace(recipe.warmup, steps=2, batch_size=4)
    sampling = dataclasses.replace(recipe.rollout.sampling, max_new_tokens=2)
    rollout = dataclasses.replace(recipe.rollout, sampling=sampling)
    recipe = dataclasses.replace(recipe, warmup=warmup, rollout=rollout)
    made = prepare_workload(tmp_path / "workload", TASKS[name], recipe)
    assert (made.model / "model.safetensors").exists()
    assert 0 <= made.accuracy <= 1
    written = made.train.stat().st_mtime_ns
    assert prepare_workload(tmp_path / "workload", TASKS[name], recipe) == made
    assert made.train.stat().st_mtime_ns == written
    assert read_rows(made.held_out)
    with pytest.raises(ValueError, match="remove it"):
        prepare_workload(tmp_path / "workload", TASKS[name], dataclasses.replace(recipe, seed=1))
