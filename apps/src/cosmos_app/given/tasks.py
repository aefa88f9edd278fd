"""Which task a recipe is, with its data read and its frozen models loaded."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from cosmos_algos import DpoConfig
from cosmos_app.given.classifier import require_classifier
from cosmos_app.given.distillation import DistillationTask
from cosmos_app.given.files import tokenizer_of
from cosmos_app.given.preference_data import PreferenceFormat, load_marked, load_pairs
from cosmos_app.given.preferences import KtoTask, Layout, PairTask
from cosmos_app.given.recipe import (
    DistillationRecipe,
    GivenRecipe,
    PreferenceRecipe,
    RewardModelRecipe,
    SftDataConfig,
)
from cosmos_app.given.reward_model import RewardTask
from cosmos_app.given.supervised import SftTask
from cosmos_app.given.task import Rows, Task, split_off
from cosmos_app.prepare import require_one_vocabulary
from cosmos_parallel import (
    SftBatchConfig,
    SftExample,
    SftFormat,
    TrainingMesh,
    load_causal_lm,
    load_sft_data,
)


def open_task(recipe: GivenRecipe, model_dir: Path, mesh: TrainingMesh) -> Task[Any]:
    """Read the data of a recipe and load the models that only score; every rank calls.

    Raises:
        SftDataError: if the data cannot be read.
        RunError: if nothing is left to train on.
        ModelNotFoundError: if there is no teacher where the recipe says.
        DataError: if the teacher has other tokens than the model.
    """
    match recipe:
        case PreferenceRecipe():
            return _preferences(recipe, model_dir, mesh)
        case RewardModelRecipe():
            return _rewards(recipe, model_dir)
        case DistillationRecipe():
            examples = supervised(recipe.data, recipe.trainer.batch, model_dir)
            require_one_vocabulary(recipe.teacher, model_dir)
            teacher = _frozen(recipe.teacher, mesh, recipe)
            return DistillationTask(examples, teacher, recipe.algorithm)
        case _:
            return supervised(recipe.data, recipe.trainer.batch, model_dir)


def supervised(data: SftDataConfig, batch: SftBatchConfig, model_dir: Path) -> SftTask:
    """Read supervised examples.

    Raises:
        SftDataError: if they cannot be read.
        RunError: if nothing is left to train on.
    """
    tokenizer = tokenizer_of(model_dir)

    def load(path: Path, rows: Rows) -> tuple[SftExample, ...]:
        assert isinstance(rows, SftFormat)
        return load_sft_data(path, tokenizer, rows).examples

    train, held_out = split_off(data, load)
    return SftTask(train, held_out, batch)


def _preferences(
    recipe: PreferenceRecipe, model_dir: Path, mesh: TrainingMesh
) -> PairTask | KtoTask:
    tokenizer, algorithm = tokenizer_of(model_dir), recipe.algorithm
    reference = _frozen(model_dir, mesh, recipe)
    layout = Layout(batch=recipe.trainer.batch, vocab_size=len(tokenizer))

    if isinstance(algorithm, DpoConfig):
        pairs = split_off(
            recipe.data, lambda path, r: load_pairs(path, tokenizer, _preference_rows(r))
        )
        return PairTask(pairs, reference, algorithm, layout)
    marked = split_off(
        recipe.data, lambda path, r: load_marked(path, tokenizer, _preference_rows(r))
    )
    return KtoTask(marked, reference, algorithm, layout)


def _rewards(recipe: RewardModelRecipe, model_dir: Path) -> RewardTask:
    require_classifier(model_dir)
    tokenizer = tokenizer_of(model_dir)
    layout = Layout(batch=recipe.trainer.batch, vocab_size=len(tokenizer))
    pairs = split_off(recipe.data, lambda path, r: load_pairs(path, tokenizer, _preference_rows(r)))
    return RewardTask(pairs, recipe.algorithm, layout)


def _preference_rows(rows: Rows) -> PreferenceFormat:
    assert isinstance(rows, PreferenceFormat)
    return rows


def _frozen(path: Path, mesh: TrainingMesh, recipe: GivenRecipe) -> nn.Module:
    """Load a model that only scores."""
    model = load_causal_lm(path, mesh, replace(recipe.model.training, lora=None))
    return model.requires_grad_(False)
