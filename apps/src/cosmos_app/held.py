"""How the ranks of a run hold the model that they train."""

from dataclasses import replace

from cosmos_app.given.recipe import GivenRecipe, RewardModelRecipe
from cosmos_app.recipe import Recipe
from cosmos_parallel import ModelConfig


def held_training(recipe: Recipe | GivenRecipe) -> ModelConfig:
    """Return how a run's model is held: with a value head for a critic or a reward model."""
    if isinstance(recipe, Recipe):
        with_head = recipe.algorithm.build().critic is not None
    else:
        with_head = isinstance(recipe, RewardModelRecipe)
    return replace(recipe.model.training, value_head=with_head)
