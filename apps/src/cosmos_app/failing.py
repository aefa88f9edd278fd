"""Replicas that fail at all they are given, told to who started the run.

They do not die, and the controller tries them again for ever: somebody has to hear of it.
"""

from collections.abc import Callable, Mapping
from typing import Any

from rich.markup import escape

from cosmos_app.statuses import statuses
from cosmos_core.bus import Bus
from cosmos_core.control import FAILURES_ALLOWED


def failing_replicas(status: Mapping[str, Any]) -> dict[str, str]:
    """Return what fails too often in a row at each replica, and what it said of it."""
    replicas: Mapping[str, Mapping[str, Any]] = status.get("replicas", {})
    found: dict[str, str] = {}
    for name, replica in replicas.items():
        if replica.get("failed_loads", 0) >= FAILURES_ALLOWED:
            found[name] = f"cannot load new weights, and tries again: {replica['load_failure']}"
        if replica.get("failures", 0) >= FAILURES_ALLOWED:
            found[name] = f"fails at all it is given, and is tried again: {replica['last_failure']}"
    return found


async def tell_failures(bus: Bus, say: Callable[[str], None]) -> None:
    """Say it of a replica when it begins to fail, for ever."""
    told: set[str] = set()
    async for status in statuses(bus):
        failing = failing_replicas(status)
        for name in sorted(failing.keys() - told):
            say(f"[yellow]{name} {escape(failing[name])}[/]")
        told = set(failing)
