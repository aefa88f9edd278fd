"""How the ranks of a run hold the model that they train."""

from dataclasses import replace
from typing import Protocol

from cosmos_algos import RewardModelConfig
from cosmos_app.recipe import Recipe
from cosmos_parallel import ModelConfig
from cosmos_rollout import VLLMConfig


class ModelSection(Protocol):
    """The model section of a recipe, of whatever kind."""

    @property
    def training(self) -> ModelConfig:
        """How it is held, but for what the algorithm adds."""
        ...


class TrainingRecipe(Protocol):
    """A recipe with a model; what it has by the name of ``algorithm`` is looked at too."""

    @property
    def model(self) -> ModelSection:
        """What is trained."""
        ...


def held_training(recipe: TrainingRecipe) -> ModelConfig:
    """Return how a run's model is held: with a value head for a critic or a reward model."""
    if isinstance(recipe, Recipe):
        with_head = recipe.algorithm.build().critic is not None
    else:  # supervised runs have no algorithm
        with_head = isinstance(getattr(recipe, "algorithm", None), RewardModelConfig)
    return replace(held_like(recipe), value_head=with_head)


def held_like(recipe: TrainingRecipe) -> ModelConfig:
    """Return how models beside a run's are held: rotary embeddings as long as the engine's."""
    training = recipe.model.training
    engine = recipe.rollout.engine if isinstance(recipe, Recipe) else None
    if training.context_length is None and isinstance(engine, VLLMConfig):
        return replace(training, context_length=engine.context_length)
    return training
