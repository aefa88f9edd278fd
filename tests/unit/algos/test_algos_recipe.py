"""Choosing an algorithm in a recipe, and from samples of a step to its loss."""

from dataclasses import dataclass, field

import pytest

from cosmos_algos import (
    AlgorithmConfig,
    ClipConfig,
    DapoConfig,
    DrGrpoConfig,
    GrpoConfig,
    IcePopConfig,
    NoCorrection,
    TisConfig,
)
from cosmos_core.config import ConfigError, config_from_json, config_to_json, load_config


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    algorithm: AlgorithmConfig = field(default_factory=GrpoConfig)


@pytest.mark.parametrize(
    ("kind", "advantage", "mode", "clip"),
    [
        ("grpo", "grpo", "sequence_mean", ClipConfig(low=0.2, high=0.2)),
        ("dapo", "grpo", "token_mean", ClipConfig(low=0.2, high=0.28)),
        ("dr_grpo", "dr_grpo", "constant", ClipConfig(low=0.2, high=0.2)),
    ],
)
def test_each_kind_is_its_paper_and_corrects_by_default(kind, advantage, mode, clip):
    algorithm = load_config(Recipe, {"algorithm": {"kind": kind}}).algorithm.build()

    assert algorithm.advantage == advantage
    assert algorithm.aggregation.mode == mode
    assert algorithm.objective.surrogate == clip
    assert algorithm.objective.correction == TisConfig(cap=2.0)


def test_every_part_can_be_set_from_a_recipe_and_survives_json():
    recipe = load_config(
        Recipe,
        {"algorithm": {"kind": "dapo", "objective": {"correction": {"kind": "icepop"}}}},
        ["algorithm.aggregation.mode=prompt_mean", "algorithm.objective.surrogate.dual=3.0"],
    )

    assert isinstance(recipe.algorithm, DapoConfig)
    assert recipe.algorithm.objective.correction == IcePopConfig()
    assert recipe.algorithm.objective.surrogate.dual == 3.0
    assert config_from_json(Recipe, config_to_json(recipe)) == recipe


def test_a_contradiction_in_a_recipe_is_a_config_error():
    with pytest.raises(ConfigError, match="would count it twice"):
        load_config(Recipe, {"algorithm": {"objective": {"anchor": "behaviour"}}})

    behaviour = load_config(
        Recipe,
        {"algorithm": {"objective": {"anchor": "behaviour", "correction": {"kind": "none"}}}},
    )
    assert behaviour.algorithm.objective.correction == NoCorrection()


def test_dr_grpo_takes_the_longest_response_as_its_constant():
    recipe = load_config(
        Recipe, {"algorithm": {"kind": "dr_grpo"}}, ["algorithm.aggregation.constant=64"]
    )

    assert isinstance(recipe.algorithm, DrGrpoConfig)
    assert recipe.algorithm.aggregation.constant == 64
