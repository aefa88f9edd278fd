"""What a policy replica is to do next: what it is told, or to publish what has had no room."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable

from cosmos_core.messages import Command

_AGAIN_S = 0.2


async def orders(
    commands: AsyncIterator[Command], is_owed: Callable[[], bool]
) -> AsyncGenerator[Command | None]:
    """Yield commands as they come, and ``None`` now and then while a publication is owed.

    Args:
        commands: of the controller; they never end.
        is_owed: tells whether weights are held that were not published.
    """
    asked: asyncio.Task[Command] | None = None
    try:
        while True:
            if asked is None:
                asked = asyncio.create_task(_next(commands))
            await asyncio.wait({asked}, timeout=_AGAIN_S if is_owed() else None)
            if not asked.done():
                yield None
                continue
            came, asked = asked, None
            yield await came
    finally:
        if asked is not None:
            asked.cancel()
            await asyncio.gather(asked, return_exceptions=True)


async def _next(commands: AsyncIterator[Command]) -> Command:
    return await anext(commands)
