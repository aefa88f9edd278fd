"""Which task a recipe is, with its data read and its frozen models loaded."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

from torch import nn

from cosmos_algos import DpoConfig, LabelledTokens
from cosmos_app.data_sets import shares_of
from cosmos_app.given.classifier import require_classifier
from cosmos_app.given.data_config import (
    GivenDataConfig,
    GivenSource,
    SftDataConfig,
    sources_of,
)
from cosmos_app.given.distillation import DistillationTask
from cosmos_app.given.divided import Divided, OfRow, Rows, split_off
from cosmos_app.given.encoded import stored_examples
from cosmos_app.given.files import tokenizer_of
from cosmos_app.given.preference_data import Encoder, PreferenceFormat, load_marked, load_pairs
from cosmos_app.given.preferences import KtoTask, Layout, PairTask
from cosmos_app.given.recipe import (
    DistillationRecipe,
    GivenRecipe,
    PreferenceRecipe,
    RewardModelRecipe,
)
from cosmos_app.given.reward_model import RewardTask
from cosmos_app.given.supervised import SftTask
from cosmos_app.given.task import Task
from cosmos_app.prepare import require_one_vocabulary, require_sight
from cosmos_parallel import (
    PictureReader,
    SftBatchConfig,
    SftData,
    SftExample,
    SftFormat,
    TrainingMesh,
    load_causal_lm,
    load_sft_data,
)


def open_task(
    recipe: GivenRecipe, model_dir: Path, mesh: TrainingMesh, encoded: Path | None = None
) -> Task[Any]:
    """Read the data of a recipe and load the models that only score; every rank calls.

    Args:
        recipe: what to train.
        model_dir: the model that training starts from.
        mesh: the ranks of this replica.
        encoded: where the launcher has left examples (`encode_data`), if it has.

    Raises:
        SftDataError: if the data cannot be read.
        DataError: if nothing is left to train on.
        ModelNotFoundError: if there is no teacher where the recipe says.
        DataError: if the teacher has other tokens than the model.
    """
    match recipe:
        case PreferenceRecipe():
            return _preferences(recipe, model_dir, mesh)
        case RewardModelRecipe():
            return _rewards(recipe, model_dir)
        case DistillationRecipe():
            examples = supervised(recipe.data, recipe.trainer.batch, model_dir, encoded)
            require_one_vocabulary(recipe.teacher, model_dir)
            if examples.filler.image_inputs is not None:
                for source in sources_of(recipe.data):
                    require_sight(recipe.teacher, source.parts[0][0])
            teacher = _frozen(recipe.teacher, mesh, recipe)
            return DistillationTask(examples, teacher, recipe.algorithm)
        case _:
            return supervised(recipe.data, recipe.trainer.batch, model_dir, encoded)


def supervised(
    data: SftDataConfig, batch: SftBatchConfig, model_dir: Path, encoded: Path | None = None
) -> SftTask:
    """Read supervised examples: those that the launcher has encoded, or else their rows.

    Raises:
        SftDataError: if they cannot be read.
        DataError: if nothing is left to train on.
    """
    tokenizer, reader = tokenizer_of(model_dir), PictureReader.of(model_dir)
    sets: dict[str, tuple[Sequence[SftExample], Sequence[SftExample]]] = {}
    num_left_out = 0
    for source in sources_of(data):

        def load(path: Path, rows: SftFormat) -> SftData:
            stored = stored_examples(encoded, path, model_dir, rows) if encoded else None
            return stored or load_sft_data(path, tokenizer, rows, reader)

        train, held_out, num_dropped = _examples_of(source, load)
        sets[source.name] = (train, held_out)
        num_left_out += num_dropped
    divided = Divided.of_sets(sets, shares_of(data.sets))
    return SftTask(divided, batch, reader, num_left_out=num_left_out)


def _examples_of(
    source: GivenSource, read: Callable[[Path, SftFormat], SftData]
) -> tuple[tuple[SftExample, ...], tuple[SftExample, ...], int]:
    """Return what is trained on and kept back, and how much of the former is too long."""
    num_dropped: list[int] = []  # of what is trained on, then of what is validated on

    def load(path: Path, rows: Rows) -> list[tuple[SftExample, ...]]:
        assert isinstance(rows, SftFormat)
        found = read(path, rows)
        num_dropped.append(found.num_dropped)
        return found.by_row()

    train, held_out = (tuple(chain.from_iterable(rows)) for rows in split_off(source, load))
    return train, held_out, num_dropped[0] if source.path is not None else 0


def divide(data: GivenDataConfig, load: Callable[[Path, Rows], Sequence[OfRow]]) -> Divided[OfRow]:
    """Read all data sets of a recipe whose rows are an example each.

    Args:
        data: of the recipe.
        load: returns the examples of a file.

    Raises:
        SftDataError: if one cannot be read.
        DataError: if nothing of one is left to train on.
    """
    sets = {source.name: split_off(source, load) for source in sources_of(data)}
    return Divided.of_sets(sets, shares_of(data.sets))


def _preferences(
    recipe: PreferenceRecipe, model_dir: Path, mesh: TrainingMesh
) -> PairTask | KtoTask:
    encoder, algorithm = _encoder_of(model_dir), recipe.algorithm
    reference = _frozen(model_dir, mesh, recipe)

    if isinstance(algorithm, DpoConfig):
        pairs = divide(recipe.data, lambda path, r: load_pairs(path, encoder, _preference_rows(r)))
        layout = _layout(recipe, encoder, [one for pair in pairs.rows() for one in pair])
        return PairTask(pairs, reference, algorithm, layout)
    marked = divide(recipe.data, lambda path, r: load_marked(path, encoder, _preference_rows(r)))
    layout = _layout(recipe, encoder, [sample.tokens for sample in marked.rows()])
    return KtoTask(marked, reference, algorithm, layout)


def _encoder_of(model_dir: Path) -> Encoder:
    return Encoder(tokenizer=tokenizer_of(model_dir), reader=PictureReader.of(model_dir))


def _layout(
    recipe: PreferenceRecipe | RewardModelRecipe,
    encoder: Encoder,
    samples: Sequence[LabelledTokens],
) -> Layout:
    """Return how samples become batches: with pictures, if any of them has one."""
    return Layout(
        batch=recipe.trainer.batch,
        vocab_size=len(encoder.tokenizer),
        pictures=encoder.reader if any(sample.images for sample in samples) else None,
        longest=recipe.data.rows.max_tokens,
    )


def _rewards(recipe: RewardModelRecipe, model_dir: Path) -> RewardTask:
    require_classifier(model_dir)
    encoder = _encoder_of(model_dir)
    pairs = divide(recipe.data, lambda path, r: load_pairs(path, encoder, _preference_rows(r)))
    layout = _layout(recipe, encoder, [one for pair in pairs.rows() for one in pair])
    return RewardTask(pairs, recipe.algorithm, layout)


def _preference_rows(rows: Rows) -> PreferenceFormat:
    assert isinstance(rows, PreferenceFormat)
    return rows


def _frozen(path: Path, mesh: TrainingMesh, recipe: GivenRecipe) -> nn.Module:
    """Load a model that only scores."""
    model = load_causal_lm(path, mesh, replace(recipe.model.training, lora=None))
    return model.requires_grad_(False)
