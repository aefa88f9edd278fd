"""What rewards and environments need, held against the files and functions that are there."""

from cosmos_app.environment_rows import brings_rows
from cosmos_app.errors import DataError
from cosmos_app.recipe import Recipe
from cosmos_rollout import (
    ModelReward,
    PythonEnvironmentConfig,
    ToolEnvironmentConfig,
    UserCodeError,
    find_callable,
)


def require_rewards(recipe: Recipe) -> None:
    """Check that all is there that rewards and environments name.

    Raises:
        DataError: naming the setting and what is missing.
    """
    _require_functions(recipe)
    _require_budgets(recipe)
    _require_reward_models(recipe)


def _require_budgets(recipe: Recipe) -> None:
    """Check that there are rows that can have a budget.

    Raises:
        DataError: if sums are generated, which have none.
    """
    budget = getattr(recipe.length_reward, "field", "")
    if budget and recipe.data.is_generated and not brings_rows(recipe):
        raise DataError(
            f"length_reward: it reads the field {budget!r} of data rows, which sums that are "
            "generated have not; set data.path, or length_reward.kind = 'relative'"
        )


def _require_functions(recipe: Recipe) -> None:
    """Check that the functions of the user's are there; only the processes of rollouts import them.

    Raises:
        DataError: naming the setting and what is wrong.
    """
    rewards, environment = recipe.reward, recipe.rollout.environment
    named = {
        "reward.rewards": [one.function for one in rewards.rewards if one.kind == "python"],
        "reward.group_rewards": [one.function for one in rewards.group_rewards],
    }
    if isinstance(environment, PythonEnvironmentConfig):
        named["rollout.environment.function"] = [environment.function]
    elif isinstance(environment, ToolEnvironmentConfig):
        named["rollout.environment.functions"] = list(environment.functions)
    for setting, references in named.items():
        for reference in references:
            try:
                find_callable(reference)
            except UserCodeError as error:
                raise DataError(f"{setting}: {reference}: {error}") from error


def _require_reward_models(recipe: Recipe) -> None:
    """Check that models that reward are there; only the processes of rollouts load them.

    Raises:
        DataError: naming the setting and what is missing.
    """
    for reward in recipe.reward.rewards:
        if isinstance(reward, ModelReward) and not (reward.path / "config.json").is_file():
            raise DataError(
                f"reward.rewards: {reward.name}: {reward.path} is no model directory (it has no "
                "config.json); give one that AutoModelForSequenceClassification loads"
            )
