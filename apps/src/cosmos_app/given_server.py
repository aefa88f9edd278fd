"""A look at a recipe's Redis server, or at the place of its own, where it is checked or begins."""

import asyncio
from pathlib import Path

from cosmos_app.recipe import BusConfig
from cosmos_core.bus import (
    Bus,
    BusPasswordError,
    BusUnreachableError,
    RedisServer,
    ServerStartError,
)
from cosmos_core.rundir import RunDirectory

_CONNECT_S = 5.0


async def require_server(config: BusConfig, resumed: Path | None) -> None:
    """Look at a run's server, or at where it would start its own, before anything is written.

    Args:
        config: which server.
        resumed: the run that is gone on with, whose own server may still have the port; ``None``
            for a new one.

    Raises:
        BusUnreachableError: if it does not answer or refuses the password, or the URL is none.
        ServerSettingsError: if it would lose the run, or fail it late, with what mends that.
        BusRefusedError: if it has no such database.
        NotARunDirectoryError: if what is gone on with is no run.
        ServerStartError: if its own cannot have its address, with what to set.
    """
    if config.url is None:
        _require_place(config, resumed)
        return
    async with await Bus.connect(config.url, "check") as bus:
        await bus.check_server()


def _require_place(config: BusConfig, resumed: Path | None) -> None:
    predecessor = None
    if resumed is not None and resumed.exists():
        predecessor = RunDirectory.open(resumed).redis
    try:
        RedisServer.check_place(port=config.port, host=config.host, predecessor=predecessor)
    except ServerStartError as error:
        raise ServerStartError(
            f"{error}; bus.port=NUMBER chooses another port, bus.port=0 any free one, bus.host an "
            "address of this machine, and bus.url a server that runs already"
        ) from error


def server_warnings(config: BusConfig) -> tuple[str, ...]:
    """Return what somebody should know of a run's server; nothing of one that the run starts.

    That it does not answer is a warning: recipes are checked in other places than they run in.

    Raises:
        BusPasswordError: if it answers, and refuses the password.
        ServerSettingsError: if it would lose the run, or fail it late, with what mends that.
        BusRefusedError: if it has no such database.
    """
    return asyncio.run(_look(config.url)) if config.url is not None else ()


async def _look(url: str) -> tuple[str, ...]:
    try:
        async with await Bus.connect(url, "check", connect_s=_CONNECT_S, patience_s=0.0) as bus:
            return tuple(await bus.check_server())
    except BusPasswordError:
        raise
    except BusUnreachableError as error:
        return (f"bus.url: {error}",)
