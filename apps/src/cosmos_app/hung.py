"""Replicas that hang: told to who started the run, and killed when they do not come back.

A hung process lives, so nobody starts it again. The controller takes its lease and gives what it
held to others; it joins again by itself if it goes on::

    progress ─lease over─► silent, told ─hung_s over─► killed ─► started again, as after a death
                              └─ goes on ─► joins again
"""

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from cosmos_app.supervisor import Supervisor
from cosmos_core.bus import Bus, BusUnreachableError

_LOOK_S = 1.0


def lost_leases(status: Mapping[str, Any]) -> dict[str, float]:
    """Return who has lost the lease and was not heard of since, and when, since the epoch."""
    return {name: status["time_s"] - for_s for name, for_s in status.get("silent", {}).items()}


async def end_hung(
    bus: Bus, supervisor: Supervisor, hung_s: float, say: Callable[[str], None]
) -> None:
    """Say who hangs, and kill it after ``hung_s`` seconds without its lease; for ever."""
    told: set[str] = set()
    while True:
        await asyncio.sleep(_LOOK_S)
        try:
            status = await bus.read_status()
        except BusUnreachableError:
            continue
        lost = lost_leases(status)
        for name in sorted(lost.keys() - told):
            what = f"; it is killed in {hung_s:g} s, unless it goes on"
            say(
                f"[yellow]{name} hangs: it has lost its lease, bus.lease_s without progress"
                f"{what if supervisor.pid(name) is not None else ''}[/]"
            )
        told = set(lost)
        for name, since_s in lost.items():
            if status["time_s"] - since_s >= hung_s:
                supervisor.end_hung(name, since_s)
