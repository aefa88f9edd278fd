"""Supervised rows as tokens, made once for all ranks of a run and for its restarts."""

import asyncio
import functools
import hashlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.progress import Progress, TextColumn, TimeElapsedColumn

from cosmos_app.given.data_config import SftDataConfig, sources_of
from cosmos_app.given.files import model_of
from cosmos_app.given.recipe import GivenRecipe
from cosmos_core.rundir import RunDirectory
from cosmos_parallel import Encoders, SftData, SftFormat, is_stored, store_sft_data, stored_sft_data

_MOST_PROCESSES = 32
_WORTH_SAYING_S = 5.0


class _GivenUpError(Exception):
    """Ends what encodes, as the run is ended."""


def encoded_of(run: RunDirectory) -> Path:
    """Return where a run keeps its encoded examples."""
    return run.path / "data"


def stored_examples(encoded: Path, path: Path, model: Path, rows: SftFormat) -> SftData | None:
    """Return the examples that `encode_data` made of a file; ``None`` if it made none of these."""
    return stored_sft_data(_folder(encoded, path, rows), path, model, rows)


async def encode_data(recipe: GivenRecipe, run: RunDirectory, console: Console) -> None:
    """Encode the supervised rows of a recipe, with all processors; what is there already is kept.

    Raises:
        SftDataError: naming the file, line and field of what is no example.
    """
    model = model_of(recipe, run)
    for path, rows in _supervised(recipe):
        folder = _folder(encoded_of(run), path, rows)
        if is_stored(folder, path, model, rows):
            continue
        begun = time.monotonic()
        encode = functools.partial(store_sft_data, folder, path, model, rows)
        num_rows = await _shown(encode, console)
        if (took_s := time.monotonic() - begun) > _WORTH_SAYING_S:
            said = f"data: {num_rows:,} rows of {path} encoded in {took_s:.0f} s"
            console.print(said, soft_wrap=True, markup=False)


async def _shown(encode: Callable[..., None], console: Console) -> int:
    """Encode with a line that says how far it is; return the number of rows."""
    is_given_up = threading.Event()
    columns = (TextColumn("data: {task.completed:,} rows encoded"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        bar = progress.add_task("", total=None)

        def tell(done: int) -> None:
            if is_given_up.is_set():
                raise _GivenUpError
            progress.update(bar, completed=done)

        encoders = Encoders(processes=min(len(os.sched_getaffinity(0)), _MOST_PROCESSES))
        try:
            await asyncio.to_thread(encode, encoders=encoders, told=tell)
        except asyncio.CancelledError:
            is_given_up.set()
            raise
        return int(progress.tasks[bar].completed)


def _supervised(recipe: GivenRecipe) -> Iterator[tuple[Path, SftFormat]]:
    """Yield each file of supervised rows, and how it is read."""
    if isinstance(recipe.data, SftDataConfig):
        for source in sources_of(recipe.data):
            for path, split in source.parts:
                yield path, replace(recipe.data.rows, split=split)


def _folder(encoded: Path, path: Path, rows: SftFormat) -> Path:
    named = f"{path.absolute()}\0{rows.split}".encode()
    return encoded / hashlib.sha256(named).hexdigest()[:16]
