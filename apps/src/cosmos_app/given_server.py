"""A look at the Redis server that a recipe names, from where the recipe is checked."""

import asyncio

from cosmos_app.recipe import BusConfig
from cosmos_core.bus import Bus, BusUnreachableError

_CONNECT_S = 5.0


def server_warnings(config: BusConfig) -> tuple[str, ...]:
    """Return what somebody should know of a run's server; nothing of one that the run starts.

    That it does not answer is a warning: recipes are checked in other places than they run in.

    Raises:
        ServerSettingsError: if it would lose the run, or fail it late, with what mends that.
        BusRefusedError: if it has no such database.
    """
    return asyncio.run(_look(config.url)) if config.url is not None else ()


async def _look(url: str) -> tuple[str, ...]:
    try:
        async with await Bus.connect(url, "check", connect_s=_CONNECT_S, patience_s=0.0) as bus:
            return tuple(await bus.check_server())
    except BusUnreachableError as error:
        return (f"bus.url: {error}",)
