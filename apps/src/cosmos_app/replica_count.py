"""How many replicas a run on this machine has, when somebody asks for more or fewer.

The controller sends those away that are too many; the launcher, here, starts what is missing.
"""

import asyncio
import itertools
import math
from collections.abc import Callable, Mapping
from typing import Any

from cosmos_app.statuses import LOOK_S, statuses
from cosmos_app.supervisor import ChildSpec, Supervisor
from cosmos_core.bus import Bus
from cosmos_core.messages import ReplicaLeft

_KINDS = {"wanted_rollouts": "rollout-", "wanted_policies": "policy-"}


def missing_replicas(status: Mapping[str, Any], running: set[str]) -> list[str]:
    """Return the names of replicas to start, given what the controller says and what runs here."""
    return [
        name
        for key, prefix in _KINDS.items()
        for name in _missing(status, {n for n in running if n.startswith(prefix)}, key)
    ]


def _missing(status: Mapping[str, Any], running: set[str], key: str) -> list[str]:
    wanted, prefix = status.get(key, -1), _KINDS[key]
    if wanted < 0 or status.get("stopping"):
        return []
    known = status.get("replicas", {})
    staying = {n for n in running if not known.get(n, {}).get("leaving", False)}
    free = (f"{prefix}{i}" for i in itertools.count() if f"{prefix}{i}" not in running)
    return list(itertools.islice(free, max(0, wanted - len(staying))))


async def keep_replicas(
    bus: Bus,
    supervisor: Supervisor,
    spec_of: Callable[[str], ChildSpec],
    say: Callable[[str], None],
) -> None:
    """Start replicas that are missing, for ever."""
    async for status in statuses(bus):
        # who was given up is not missed: it would die again
        for name in missing_replicas(status, {*supervisor.running(), *supervisor.given_up}):
            say(f"{name} is started: more replicas of its kind are wanted")
            supervisor.start(spec_of(name))


async def await_farewells(bus: Bus, longest_s: float) -> None:
    """Return when every replica that the controller knew at its end has left, or after a while.

    Until then they may be writing an export, or have the order to stop before them.
    """
    known = set((await bus.read_status()).get("replicas", {}))
    for _ in range(math.ceil(longest_s / LOOK_S)):
        if known <= {e.replica for e in await bus.unheard() if isinstance(e, ReplicaLeft)}:
            return
        await asyncio.sleep(LOOK_S)
