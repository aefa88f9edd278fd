"""A run in which nothing happens, told with what it waits for to who started the run.

Its controller says so at any time (``waiting_for``); here it is told once nothing has happened for
longer than is usual, and again if something else is waited for.
"""

import heapq
import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.markup import escape

from cosmos_app.statuses import statuses
from cosmos_core.bus import Bus

_LEAST_S = 10.0
_MOST_S = 120.0
_TIMES_USUAL = 2.0
_SILENT_S = 10.0
_SECONDS = re.compile(r"\d+(?:\.\d+)? s\b")
_COUNTERS = ("generated_samples", "loads", "replicas_joined")


class Stillness:
    """Tells from what a controller says of its run when that stands still.

    How long a pause is usual is learnt from the second longest since the first step: a step of a
    large model takes a while, and one pause that was told does not hide the next::

        progress ─ `patience_s` ─► told ─ another reason, as long ─► told ─ progress ─► "goes on"
    """

    def __init__(self, now_s: float) -> None:
        """Begin with a run of which nothing is known.

        Args:
            now_s: seconds of any clock, as are all of `look`.
        """
        self._progress: object = None
        self._reason = ""
        self._progress_s = self._reason_s = now_s
        self._longest = [0.0, 0.0]
        self._is_told = self._was_told = False

    def look(self, status: Mapping[str, Any], waits_for: str, now_s: float) -> str:
        """Return what to say of the run now; empty for nothing.

        Args:
            status: that the controller wrote last; empty before its first.
            waits_for: what the run waits for, in words.
            now_s: when.
        """
        still_s = now_s - self._progress_s
        reason = _SECONDS.sub("", waits_for)
        if reason != self._reason:
            self._reason, self._reason_s, self._is_told = reason, now_s, False
        if (progress := _progress(status)) != self._progress:
            self._progress = progress
            self._progress_s = self._reason_s = now_s
            if status.get("step", 0) > 0:
                heapq.heappushpop(self._longest, still_s)
            was_told, self._was_told, self._is_told = self._was_told, False, False
            return f"it goes on after {still_s:.0f} s" if was_told else ""
        is_early = now_s - self._reason_s < self.patience_s
        if self._is_told or is_early or status.get("finished"):
            return ""
        self._is_told = self._was_told = True
        return f"nothing has happened for {still_s:.0f} s; the run waits for {waits_for}"

    @property
    def patience_s(self) -> float:
        """Seconds in which nothing happens before it is told: 10, at most 120."""
        return min(_MOST_S, max(_LEAST_S, _TIMES_USUAL * self._longest[0]))


def _progress(status: Mapping[str, Any]) -> tuple[object, ...]:
    """Return what is another as soon as a run gets further; failures, and tries, are none of it."""
    books: Mapping[str, Any] = status.get("books", {})
    counters: Mapping[str, Any] = status.get("counters", {})
    return (
        status.get("step"),
        status.get("published"),
        status.get("stopping"),
        status.get("finished"),
        len(status.get("validations", ())),
        status.get("validating"),
        *(books.get(name) for name in ("issued", "consumed", "dropped")),
        *(counters.get(name) for name in _COUNTERS),
    )


def waited_for(status: Mapping[str, Any], started: Sequence[str], now_s: float) -> str:
    """Return what a run waits for, in words.

    Args:
        status: that its controller wrote last; empty before its first.
        started: names of the processes that the launcher keeps alive.
        now_s: seconds since the epoch.
    """
    if not status:
        return "its controller to begin (logs/controller.log)"
    silent_s = now_s - status["time_s"]
    if silent_s > _SILENT_S:
        return f"its controller, which is silent for {silent_s:.0f} s (logs/controller.log)"
    there: Mapping[str, Any] = status.get("replicas", {})
    absent = [
        name for name in started if name.startswith(("policy-", "rollout-")) and name not in there
    ]
    said = str(status.get("waiting_for", ""))
    if not absent or " to join" not in said:
        return said
    return f"{said}; not there yet: {', '.join(absent)} (logs/{absent[0]}.log)"


async def tell_stillness(
    bus: Bus, started: Callable[[], Sequence[str]], say: Callable[[str], None]
) -> None:
    """Say it of a run when it stands still, and when it goes on, for ever.

    Args:
        bus: of the run.
        started: returns the names of the processes that the launcher keeps alive.
        say: shows a line.
    """
    stillness = Stillness(time.monotonic())
    async for status in statuses(bus):
        words = waited_for(status, started(), time.time())
        if said := stillness.look(status, words, time.monotonic()):
            say(f"[yellow]{escape(said)}[/]")
