"""What the controller of a run says of it, again and again."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

from cosmos_core.bus import Bus, BusUnreachableError

LOOK_S = 1.0


async def statuses(bus: Bus) -> AsyncGenerator[dict[str, Any]]:
    """Yield the status of a run each second, for ever; while its server is away there is none."""
    while True:
        await asyncio.sleep(LOOK_S)
        try:
            status = await bus.read_status()
        except BusUnreachableError:
            continue
        yield status
