"""How long a replica may go without progress before somebody ends it."""

from cosmos_app.recipe import Recipe

_COMPILE_S = 900.0
"""A large model's layers may take minutes to compile, for each length of rows under ``tp``."""


def patience_s(recipe: Recipe) -> float:
    """Return how long a replica without a lease may yet wait for what has a deadline of its own."""
    rollout = recipe.rollout
    waits = [recipe.launch.hung_s, recipe.reward.timeout_s]
    if rollout.environment is not None:
        waits.append(rollout.episode.timeout_s)
    if rollout.colocate:
        waits.append(rollout.turn_deadline_s)
    if recipe.model.training.compile != "none":
        waits.append(_COMPILE_S)
    return max(waits)


def silence_s(recipe: Recipe) -> float:
    """Return after how long without progress a replica ends itself.

    A launcher that watches it kills it a lease earlier; on a cluster nobody else does.
    """
    return 2 * recipe.bus.lease_s + patience_s(recipe)
