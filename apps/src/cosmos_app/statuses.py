"""What a run's server says, again and again: of the run itself, or of anything else."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any, TypeVar

from cosmos_core.bus import Bus, BusUnreachableError

LOOK_S = 1.0
T = TypeVar("T")


def statuses(bus: Bus) -> AsyncGenerator[dict[str, Any]]:
    """Yield the status of a run each second, for ever; while its server is away there is none."""
    return each_second(bus.read_status)


async def each_second(ask: Callable[[], Awaitable[T]]) -> AsyncGenerator[T]:
    """Yield what a run's server answers each second, for ever; nothing while it is away."""
    while True:
        await asyncio.sleep(LOOK_S)
        try:
            answer = await ask()
        except BusUnreachableError:
            continue
        yield answer
