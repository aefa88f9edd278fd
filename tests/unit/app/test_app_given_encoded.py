"""Supervised rows are encoded once for all ranks of a run, and for its restarts."""

import asyncio
import json
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from cosmos_app.given import tasks
from cosmos_app.given.encoded import encode_data, encoded_of
from cosmos_app.given.files import model_of, prepare_model
from cosmos_app.given.recipe import SftRecipe
from cosmos_app.given.tasks import supervised
from cosmos_core.config import config_to_json, load_config
from cosmos_core.rundir import RunDirectory

QUIET = Console(quiet=True)


@pytest.fixture
def recipe(tmp_path: Path) -> SftRecipe:
    path = tmp_path / "rows.jsonl"
    rows = [{"prompt": f"{n}+{n}=", "response": str(2 * n)} for n in range(3000)]
    path.write_text("\n".join(map(json.dumps, rows)))
    tiny = {"hidden_size": 32, "num_layers": 1, "num_heads": 2}
    settings = {"data": {"path": str(path), "held_out": 5}, "model": {"tiny": tiny}}
    return load_config(SftRecipe, settings)


@pytest.fixture
def run(tmp_path: Path, recipe: SftRecipe):
    made = RunDirectory.create(tmp_path / "run", config_json=config_to_json(recipe), now_s=0.0)
    with made as created:
        prepare_model(recipe, created)
        yield created


def test_ranks_take_the_examples_that_were_encoded_and_read_no_row(
    recipe: SftRecipe, run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    where, batch = (recipe.data, recipe.trainer.batch), model_of(recipe, run)
    expected = supervised(*where, batch)
    asyncio.run(encode_data(recipe, run, QUIET))
    monkeypatch.delattr(tasks, "load_sft_data")
    found = supervised(*where, batch, encoded_of(run))
    for one, other in zip(found.data.rows(), expected.data.rows(), strict=True):
        np.testing.assert_array_equal(one.token_ids, other.token_ids)
        np.testing.assert_array_equal(one.trainable, other.trainable)
    assert found.num_left_out == expected.num_left_out
    assert len(found.data.held_out[""]) == 5


def test_what_is_encoded_is_not_encoded_again_until_the_data_changes(
    recipe: SftRecipe, run: RunDirectory
) -> None:
    def written() -> list[int]:
        return [path.stat().st_mtime_ns for path in encoded_of(run).rglob("about.json")]

    asyncio.run(encode_data(recipe, run, QUIET))
    first = written()
    asyncio.run(encode_data(recipe, run, QUIET))
    assert written() == first
    assert recipe.data.path is not None
    with recipe.data.path.open("a") as rows:
        rows.write('\n{"prompt": "1+1=", "response": "2"}')
    asyncio.run(encode_data(recipe, run, QUIET))
    assert len(written()) == 1
    assert written() != first


async def test_encoding_is_given_up_with_the_run(recipe: SftRecipe, run: RunDirectory) -> None:
    encoding = asyncio.create_task(encode_data(recipe, run, QUIET))
    while not list(encoded_of(run).glob("*.partial/tokens.bin")):  # noqa: ASYNC110, of a thread
        await asyncio.sleep(0.001)
    encoding.cancel()
    with pytest.raises(asyncio.CancelledError):
        await encoding
    async with asyncio.timeout(30):
        while list(encoded_of(run).iterdir()):  # noqa: ASYNC110, the thread goes on for a bit
            await asyncio.sleep(0.01)
