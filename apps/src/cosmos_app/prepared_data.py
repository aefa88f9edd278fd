"""The rows of a run: written once, then drawn from by its rollouts."""

import json
from collections import defaultdict
from pathlib import Path

from cosmos_app.data_config import DataConfig, Source
from cosmos_app.environment_rows import brings_rows, write_environment_rows
from cosmos_app.errors import DataError
from cosmos_app.prepare import RunFiles
from cosmos_app.prompt_rows import prompt_rows, row_with_media_in
from cosmos_app.quickstart.arithmetic import Row, write_rows
from cosmos_app.recipe import Recipe
from cosmos_core.turns import evenly_spread
from cosmos_rollout import PromptFile, PromptMixture, PromptSet, PromptSource, data_set_of

_FEWEST_HELD_OUT = 1


def prepare_data(recipe: Recipe, files: RunFiles) -> tuple[int, int]:
    """Write the train and held-out rows of a run; return how many there are of each.

    Those to train on are written last: where they are, all is there.

    Raises:
        DataError: if the recipe names a file that cannot be used, more rows than can be made, or
            an environment whose rows cannot be had.
    """
    sources = recipe.data.sources
    if brings_rows(recipe):
        sources = (write_environment_rows(recipe, files.train.with_name("environment.jsonl")),)
    if not sources:
        train, held_out = recipe.data.generate(recipe.seed)
    else:
        media = _media_of(files)
        divided = {s.name: _divided(s, recipe.data, media) for s in sources}
        train = [row for rows, _ in divided.values() for row in rows]
        counts = {name: len(rows) for name, (_, rows) in divided.items()}
        held_out = [divided[name][1][number] for name, number in evenly_spread(counts)]
    write_rows(files.held_out, held_out)
    write_rows(files.train, train)
    return len(train), len(held_out)


def follow_data(files: RunFiles) -> None:
    """Have rows name their pictures and videos where these are, if the run's directory was moved.

    Args:
        files: of a run whose data is prepared.
    """
    if not _media_of(files).exists():
        return
    for path in (files.held_out, files.train):
        rows: list[Row] = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
        followed = [row_with_media_in(row, _media_of(files)) for row in rows]
        if followed != rows:
            write_rows(path, followed)


def _media_of(files: RunFiles) -> Path:
    return files.train.with_name("media")


def open_prompts(recipe: Recipe, files: RunFiles) -> dict[str, PromptSource]:
    """Return what training and validation draw prompts from, by source."""
    rows = PromptFile(files.train)
    prompts: dict[str, PromptSource] = {"train": PromptSet(rows, seed=recipe.seed)}
    if shares := recipe.data.shares:
        of_set = _rows_by_set(files.train)
        sets = {name: PromptSet(rows.only(of_set[name]), seed=recipe.seed) for name in shares}
        prompts["train"] = PromptMixture(sets, shares)
    if files.held_out in files.with_rows:
        prompts["validation"] = PromptSet(PromptFile(files.held_out), order="file")
    return prompts


def _rows_by_set(path: Path) -> dict[str, list[int]]:
    """Return which rows of a prepared data file are of which data set."""
    found = defaultdict[str, list[int]](list)
    with path.open("rb") as lines:
        for number, line in enumerate(lines):
            found[data_set_of(json.loads(line))].append(number)
    return found


def num_validated(recipe: Recipe) -> int:
    """Return how many prompts a validation has; nothing is written, and no environment begun.

    Raises:
        DataError: if rows cannot be read.
    """
    data = recipe.data
    if brings_rows(recipe):
        held_out = data.held_out
    elif data.is_generated:
        held_out = len(data.generate(recipe.seed)[1])
    else:
        held_out = sum(len(_divided(source, data, None)[1]) for source in data.sources)
    return recipe.validation.plan(held_out).num_prompts


def _divided(source: Source, data: DataConfig, media: Path | None) -> tuple[list[Row], list[Row]]:
    """Read a data set; return its rows to train on and to validate on, which say whose they are."""

    def read(path: Path | None) -> list[Row]:
        if path is None:
            return []
        rows = prompt_rows(path, media, data.video_sampling)
        return [{**row, "data_set": source.name} if source.name else row for row in rows]

    train = read(source.path)
    if source.held_out_path is not None:
        return train, read(source.held_out_path)
    kept = len(train) - min(data.held_out, max(_FEWEST_HELD_OUT, len(train) // 10))
    if not kept:
        raise DataError(
            f"data file {source.path}: no row is left to train on when one is kept back; set "
            "data.held_out=0"
        )
    return train[:kept], train[kept:]


def count_rows(path: Path) -> int:
    """Return how many rows a prepared data file has."""
    with path.open("rb") as lines:
        return sum(1 for line in lines if line.strip())
