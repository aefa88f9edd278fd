"""Rows that an environment brings along, for a recipe that names no others."""

from pathlib import Path

from cosmos_app.data_config import Source
from cosmos_app.errors import DataError
from cosmos_app.quickstart.arithmetic import Row, write_rows
from cosmos_app.recipe import Recipe
from cosmos_core.videos import is_video
from cosmos_rollout import PromptRow, RolloutError, VerifiersEnvironmentConfig


def brings_rows(recipe: Recipe) -> bool:
    """Whether a recipe's prompts are those of its environment: it has one, and names no others."""
    is_free = recipe.data.is_generated and recipe.data.reversal is None
    return is_free and isinstance(recipe.rollout.environment, VerifiersEnvironmentConfig)


def write_environment_rows(recipe: Recipe, path: Path) -> Source:
    """Load a recipe's environment and write its data set; return that as a source of rows.

    Raises:
        DataError: if the environment cannot be loaded, or has no data set.
    """
    environment = recipe.rollout.environment
    assert isinstance(environment, VerifiersEnvironmentConfig)
    if recipe.validation.every and not recipe.data.held_out:
        raise DataError(
            f"validation.every is {recipe.validation.every}, and there is nothing to validate on: "
            "data.held_out keeps none of the environment's rows back"
        )
    try:
        rows = [_written(row) for row in environment.build().rows()]
    except RolloutError as error:
        raise DataError(f"rollout.environment: {error}; name rows by data.path") from error
    if not rows:
        raise DataError(
            f"rollout.environment: the data set of {environment.id} is empty; name rows by "
            "data.path"
        )
    write_rows(path, rows)
    return Source("", path, None)


def _written(row: PromptRow) -> Row:
    shown = {
        "images": [one for one in row.images if not is_video(one)],
        "videos": [one for one in row.images if is_video(one)],
    }
    return {
        **row.fields,
        "id": row.prompt_id,
        **({"messages": list(row.messages)} if row.messages else {"prompt": row.prompt}),
        **{name: found for name, found in shown.items() if found},
        **({} if row.answer is None else {"answer": row.answer}),
    }
