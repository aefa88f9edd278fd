"""What a supervised run finds and leaves in its run directory."""

from pathlib import Path

from cosmos_app.errors import RunError
from cosmos_app.prepare import require_model
from cosmos_app.quickstart.tiny_model import build_tiny_model
from cosmos_app.sft.recipe import SftRecipe
from cosmos_core.config import config_from_json
from cosmos_core.rundir import RunDirectory, write_atomic
from cosmos_parallel import SftData, load_sft_data, read_rows

_MEETING_FILE = "meeting_place"
_STOP_FILE = "stop"


def recipe_of(run: RunDirectory) -> SftRecipe:
    """Read the recipe that the directory of a supervised run holds.

    Raises:
        ConfigError: if it is another kind of run.
    """
    return config_from_json(SftRecipe, run.config.read_text(encoding="utf-8"))


def model_of(recipe: SftRecipe, run: RunDirectory) -> Path:
    """Return the directory of the model that training starts from."""
    return (recipe.model.path or run.path / "model").absolute()


def checkpoints_of(recipe: SftRecipe, run: RunDirectory) -> Path | str:
    """Return where the checkpoints of a run lie."""
    return recipe.trainer.checkpoints or run.checkpoints


def prepare_model(recipe: SftRecipe, run: RunDirectory) -> int:
    """Build the tiny model when the recipe names none; return its number of parameters, or 0.

    Raises:
        DataError: if the recipe names a directory without a model in it.
        SftDataError: if the data cannot be read.
    """
    if recipe.model.path is not None:
        require_model(recipe.model.path)
        return 0
    model = model_of(recipe, run)
    if model.exists():
        return 0
    texts = (str(row) for _, row in read_rows(recipe.data.path, recipe.data.rows.split))
    partial = model.with_suffix(".partial")
    parameters = build_tiny_model(partial, texts, recipe.model.tiny, recipe.seed)
    partial.replace(model)
    return parameters


def load_examples(recipe: SftRecipe, model: Path) -> tuple[SftData, SftData | None]:
    """Return the examples to train on, and those to validate on if there are any.

    Raises:
        SftDataError: if they cannot be read.
        RunError: if nothing is left to train on.
    """
    from dataclasses import replace

    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    config = recipe.data
    train = load_sft_data(config.path, tokenizer, config.rows)
    if config.validation_path is not None:
        return train, load_sft_data(config.validation_path, tokenizer, config.rows)
    if config.validation_split:
        rows = replace(config.rows, split=config.validation_split)
        return train, load_sft_data(config.path, tokenizer, rows)
    if not config.held_out:
        return train, None
    kept = len(train.examples) - config.held_out
    if kept < 1:
        raise RunError(
            f"data.held_out is {config.held_out}, but {config.path} has {len(train.examples)} "
            "examples: none would be left to train on"
        )
    held_out = SftData(examples=train.examples[kept:])
    return replace(train, examples=train.examples[:kept]), held_out


def write_meeting_place(run: RunDirectory, address: str) -> None:
    """Leave where the replicas of a run meet."""
    write_atomic(run.path / _MEETING_FILE, address)


def forget_meeting_place(run: RunDirectory) -> None:
    """Remove what an earlier launch left."""
    (run.path / _MEETING_FILE).unlink(missing_ok=True)
    (run.path / _STOP_FILE).unlink(missing_ok=True)


def read_meeting_place(run: RunDirectory) -> str | None:
    """Return where the replicas of a run meet, once that is known."""
    path = run.path / _MEETING_FILE
    return path.read_text() if path.exists() else None


def ask_to_stop(run: RunDirectory) -> None:
    """Ask all replicas to end after the step in hand."""
    (run.path / _STOP_FILE).touch()


def is_asked_to_stop(run: RunDirectory) -> bool:
    """Whether somebody asked for that."""
    return (run.path / _STOP_FILE).exists()
