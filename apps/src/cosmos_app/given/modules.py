"""What the replicas of a run on given data import, for the process that forks them."""

from cosmos_app.given.recipe import GivenRecipe
from cosmos_app.preloaded import Shared
from cosmos_app.replica_modules import TRAINING, is_wanted, of_models


def learners(recipe: GivenRecipe) -> Shared:
    """Return what the replicas of a run on given data import; nothing if torchrun starts them.

    Args:
        recipe: of the run.
    """
    if not is_wanted(recipe.launch) or recipe.policy.ranks > 1:
        return Shared(modules=())
    roles = ("cosmos_app.cli", "cosmos_app.given.role", "cosmos_app.given.tasks")
    return Shared(modules=(*roles, *TRAINING, *of_models([recipe.model.path])))
