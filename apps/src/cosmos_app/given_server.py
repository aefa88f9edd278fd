"""A look at the Redis server that a recipe names, from where it is checked or begins to run."""

import asyncio

from cosmos_app.recipe import BusConfig
from cosmos_core.bus import Bus, BusPasswordError, BusUnreachableError

_CONNECT_S = 5.0


async def require_server(config: BusConfig) -> None:
    """Look at a run's server before anything is written for the run, unless it starts its own.

    Raises:
        BusUnreachableError: if it does not answer or refuses the password, or the URL is none.
        ServerSettingsError: if it would lose the run, or fail it late, with what mends that.
        BusRefusedError: if it has no such database.
    """
    if config.url is not None:
        async with await Bus.connect(config.url, "check") as bus:
            await bus.check_server()


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
