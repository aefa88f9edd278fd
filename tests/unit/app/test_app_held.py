"""How the model of a run is held: what the algorithm and the engine add to the recipe's words."""

from dataclasses import replace
from pathlib import Path

import pytest

from cosmos_algos import PpoConfig
from cosmos_app.held import held_like, held_training
from cosmos_app.recipe import ModelConfig, Recipe
from cosmos_rollout import ScriptedConfig, VLLMConfig


@pytest.mark.parametrize(
    ("engine", "own", "expected"),
    [
        (VLLMConfig(context_length=48), None, 48),
        (VLLMConfig(), None, 0),
        (VLLMConfig(context_length=48), 64, 64),
        (ScriptedConfig(), None, None),
    ],
)
def test_rotary_embeddings_are_as_long_as_the_engines(engine, own, expected):
    recipe = Recipe(model=ModelConfig(path=Path("model")))
    training = replace(recipe.model.training, context_length=own)
    recipe = replace(
        recipe,
        model=replace(recipe.model, training=training),
        rollout=replace(recipe.rollout, engine=engine),
        algorithm=PpoConfig(),
    )
    assert held_training(recipe).context_length == expected
    assert held_training(recipe).value_head
    assert held_like(recipe).context_length == expected
    assert not held_like(recipe).value_head
