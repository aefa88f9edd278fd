"""How many rollout replicas a run on this machine has, when somebody asks for more or fewer.

The controller sends those away that are too many; the launcher, here, starts what is missing.
"""

import asyncio
import itertools
import math
from collections.abc import Callable, Mapping
from typing import Any

from cosmos_app.supervisor import ChildSpec, Supervisor
from cosmos_core.bus import Bus, BusUnreachableError

_LOOK_S = 1.0
_PREFIX = "rollout-"


def missing_rollouts(status: Mapping[str, Any], running: set[str]) -> list[str]:
    """Return the names of replicas to start, given what the controller says and what runs here."""
    wanted = status.get("wanted_rollouts", -1)
    if wanted < 0 or status.get("stopping"):
        return []
    known = status.get("replicas", {})
    staying = {n for n in running if not known.get(n, {}).get("leaving", False)}
    free = (f"{_PREFIX}{i}" for i in itertools.count() if f"{_PREFIX}{i}" not in running)
    return list(itertools.islice(free, max(0, wanted - len(staying))))


async def keep_rollouts(
    bus: Bus,
    supervisor: Supervisor,
    spec_of: Callable[[str], ChildSpec],
    say: Callable[[str], None],
) -> None:
    """Start replicas that are missing, for ever."""
    while True:
        await asyncio.sleep(_LOOK_S)
        try:
            status = await bus.read_status()
        except BusUnreachableError:
            continue
        running = {name for name in supervisor.running() if name.startswith(_PREFIX)}
        for name in missing_rollouts(status, running):
            say(f"{name} is started: {status['wanted_rollouts']} rollout replicas are wanted")
            supervisor.start(spec_of(name))


async def await_farewells(bus: Bus, longest_s: float) -> None:
    """Return when every replica that the controller knew at its end has left, or after a while.

    Until then they may be writing an export, or have the order to stop before them.
    """
    known = set((await bus.read_status()).get("replicas", {}))
    for _ in range(math.ceil(longest_s / _LOOK_S)):
        if known <= await bus.farewells():
            return
        await asyncio.sleep(_LOOK_S)
