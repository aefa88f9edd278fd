"""Whether a server answers at all: what tells one that hangs from one that refuses."""

import asyncio

from redis import exceptions

from cosmos_core.bus.connection import Bus
from cosmos_core.bus.errors import BusPasswordError, BusRefusedError, BusUnreachableError


async def answers(bus: Bus, within_s: float) -> bool:
    """Whether the server says anything within so many seconds, be it a refusal.

    One that loads its data says so. One that hangs takes what it is sent, and says nothing.
    """
    try:
        await asyncio.wait_for(bus.call(lambda c: c.echo(b""), patience_s=0.0), within_s)
    except (BusRefusedError, BusPasswordError):
        return True
    except BusUnreachableError as error:
        return isinstance(error.__cause__, exceptions.BusyLoadingError)
    except TimeoutError:
        return False
    return True
