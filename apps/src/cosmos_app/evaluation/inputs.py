"""What an evaluation asks: the recipe, its held-out prompts, and the tokenizer they are put into.

They are a run's own where there is one; otherwise made from the recipe as a run would make them.
"""

import contextlib
import tempfile
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from cosmos_app.errors import DataError
from cosmos_app.prepare import RunFiles, require_words, run_files
from cosmos_app.prepared_data import count_rows, prepare_data
from cosmos_app.prompt_rows import has_pictures
from cosmos_app.recipe import Recipe
from cosmos_app.recipes import load_any_recipe
from cosmos_app.required_rewards import require_rewards
from cosmos_core.metrics import read_metrics
from cosmos_core.rundir import RunDirectory


@dataclass(frozen=True, kw_only=True, slots=True)
class Inputs:
    """What is asked, and how.

    Attributes:
        recipe: says how answers are sampled and rewarded.
        files: the prompts, and the model whose tokenizer they are put into.
        num_held_out: rows that may be asked.
        measured: mean held-out reward by weight version, as the run measured it; empty without one.
    """

    recipe: Recipe
    files: RunFiles
    num_held_out: int
    measured: Mapping[int, float]


@contextlib.contextmanager
def open_inputs(path: Path, overrides: Sequence[str]) -> Generator[Inputs]:
    """Give what an evaluation asks; files that were made for it go with the block.

    Args:
        path: a recipe, or the directory of a run.
        overrides: each ``path=value``, over the recipe or that of the run.

    Raises:
        ConfigError: if the recipe or an override is wrong.
        NotARunDirectoryError: if the directory is none.
        DataError: if there is nothing to ask, no reward, or no tokenizer.
    """
    run = RunDirectory.open(path) if path.is_dir() else None
    recipe = load_any_recipe(path if run is None else run.config, overrides)
    if not isinstance(recipe, Recipe):
        raise DataError(
            f"{path}: a recipe of kind {recipe.kind!r} has no prompts with rewards to evaluate on; "
            "want one of kind 'rl'"
        )
    require_rewards(recipe)
    where = recipe.output if run is None else run.path
    own = replace(run_files(recipe, where), model=_tokenizer_of(recipe, where))
    measured = {} if run is None else _measured(run)
    is_there = run is not None and own.train.exists()
    if is_there and not any(override.startswith("data") for override in overrides):
        yield _checked(recipe, own, measured)
        return
    with tempfile.TemporaryDirectory(prefix="cosmos-evaluate-") as folder:
        files = replace(run_files(recipe, Path(folder)), model=own.model)
        prepare_data(recipe, files)
        yield _checked(recipe, files, measured)


def _checked(recipe: Recipe, files: RunFiles, measured: Mapping[int, float]) -> Inputs:
    num_held_out = count_rows(files.held_out)
    if not num_held_out:
        raise DataError(
            "there is nothing to evaluate on: set data.held_out or data.held_out_path (the recipe "
            "keeps no rows back)"
        )
    if has_pictures(files.held_out):
        raise DataError(
            "held-out prompts have pictures or videos, which a server that is given tokens does "
            "not take"
        )
    return Inputs(recipe=recipe, files=files, num_held_out=num_held_out, measured=measured)


def _tokenizer_of(recipe: Recipe, where: Path) -> Path:
    """Return the directory of the recipe's model, or of the one that its run has built.

    Raises:
        DataError: if there is none, or it has no words.
    """
    files = run_files(recipe, where)
    found = next((path for path in (files.model, files.built_model) if path.is_dir()), None)
    if found is None:
        raise DataError(
            f"there is no tokenizer: {files.model} is no directory; set model.path to a model "
            "directory with the tokenizer that the server has, or give the directory of a run"
        )
    require_words(found)
    return found


def _measured(run: RunDirectory) -> dict[int, float]:
    records = read_metrics(run.metrics) if run.metrics.exists() else []
    return {
        record.step: record.values["reward"]
        for record in records
        if record.role == "validation" and "reward" in record.values
    }
