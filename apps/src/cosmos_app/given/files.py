"""What a run on given data finds and leaves in its run directory."""

import json
from pathlib import Path
from typing import Any

from cosmos_algos import KtoConfig
from cosmos_app.given.data_config import sources_of
from cosmos_app.given.divided import require_rest
from cosmos_app.given.preference_data import PreferenceFormat, check_preference
from cosmos_app.given.recipe import (
    GIVEN_KINDS,
    DistillationRecipe,
    GivenRecipe,
    PreferenceRecipe,
    SftRecipe,
)
from cosmos_app.held import held_training
from cosmos_app.prepare import (
    build_once,
    require_one_vocabulary,
    require_scoring,
    require_trainable,
    texts_in,
)
from cosmos_core.config import config_from_json
from cosmos_core.rundir import RunDirectory
from cosmos_parallel import (
    PictureReader,
    SftDataError,
    check_example,
    check_place,
    encode_examples,
    read_rows,
    read_rows_in,
)


def recipe_of(run: RunDirectory) -> GivenRecipe:
    """Read the recipe that the directory of a run on given data holds.

    Raises:
        ConfigError: if it is another kind of run.
    """
    text = run.config.read_text(encoding="utf-8")
    return config_from_json(GIVEN_KINDS.get(json.loads(text).get("kind"), SftRecipe), text)


def model_of(recipe: GivenRecipe, run: RunDirectory) -> Path:
    """Return the directory of the model that training starts from."""
    return (recipe.model.path or run.path / "model").absolute()


def check_inputs(recipe: GivenRecipe) -> int:
    """Look at every file the recipe names, before anything is written.

    Every row is read, and has to have the fields that are due. The first is encoded too, where it
    is one of supervised examples and the tokenizer is there.

    Returns:
        How many rows there are in what is trained on, of which some may be kept back.

    Raises:
        DataError: if the recipe names a directory without a model in it, or a teacher that has
            other tokens than the model or cannot be divided as the recipe says; or keeps every
            row back.
        MeshError: if the model cannot be divided as the recipe says.
        CheckpointPlaceError: if nothing knows how to reach where checkpoints should lie.
        SftDataError: if the data cannot be read, naming file, line and what is wrong.
    """
    check_place(recipe.trainer.checkpoints)
    model = recipe.model
    require_trainable(model.path or model.tiny, recipe.policy, held_training(recipe))
    if model.path is not None:
        _require_teacher(recipe, model.path)
    total = 0
    for source in sources_of(recipe.data):
        try:
            num_rows, *_ = [_check_rows(recipe, path, split) for path, split in source.parts]
        except SftDataError as error:
            raise SftDataError(f"{source.label}{error}") from error
        if source.path is not None:
            require_rest(source, num_rows)
            total += num_rows
    return total


def _check_rows(recipe: GivenRecipe, path: Path, split: str) -> int:
    rows, model, num_rows = recipe.data.rows, recipe.model.path, 0
    is_marked = isinstance(recipe, PreferenceRecipe) and isinstance(recipe.algorithm, KtoConfig)
    for folder, where, row in read_rows_in(path, split):
        if isinstance(rows, PreferenceFormat):
            check_preference(row, where, rows, is_marked=is_marked)
        else:
            check_example(row, where, rows)
            if model is not None and not num_rows:
                reader = PictureReader.of(model)
                tokenizer = tokenizer_of(model)
                encode_examples(row, tokenizer, where, rows=rows, reader=reader, folder=folder)
        num_rows += 1
    if not num_rows:
        raise SftDataError(f"{path}: there is no row")
    return num_rows


def tokenizer_of(model: Path) -> Any:  # a tokenizer of transformers
    """Load the tokenizer of a model."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model)


def prepare_model(recipe: GivenRecipe, run: RunDirectory) -> int:
    """Build the tiny model when the recipe names none; return its number of parameters, or 0.

    Raises:
        DataError: if the recipe's teacher has other tokens than what was built, or cannot be
            divided as the recipe says.
        SftDataError: if the data cannot be read.
    """
    if recipe.model.path is not None:
        return 0
    model = model_of(recipe, run)
    texts = (
        text
        for source in sources_of(recipe.data)
        for path, split in (source.parts if source.name else source.parts[:1])
        for _, row in read_rows(path, split)
        for text in (str(row), *texts_in(row))
    )
    built = build_once(model, texts, recipe.model.tiny, recipe.seed)
    _require_teacher(recipe, model)
    return built


def _require_teacher(recipe: GivenRecipe, model: Path) -> None:
    """Look whether a recipe's teacher, if it has one, fits the model and the ranks.

    Raises:
        DataError: if it has other tokens than the model, or cannot be divided.
    """
    if isinstance(recipe, DistillationRecipe):
        require_one_vocabulary(recipe.teacher, model)
        require_scoring(recipe.teacher, recipe.policy, recipe.model.training)
