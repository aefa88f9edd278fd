"""Processes that hang: told to who started the run, and killed when they do not go on.

A hung process lives, so nobody starts it again. The controller takes its lease and gives what it
held to others; it joins again by itself if it goes on::

    progress ─lease over─► silent, told ─hung_s over─► killed ─► started again, as after a death
                              └─ goes on ─► joins again

A controller that hangs itself, without another that stands by, says nothing any more, or never
began to; one that stands by does not say any more that it does.
"""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from cosmos_app.supervisor import Supervisor
from cosmos_core.bus import Bus, BusUnreachableError

_LOOK_S = 1.0
_CONTROLLER = "controller"
_CONTROLLER_S = 30.0
_FIRST_WORD_S = 300.0


class HungProcesses:
    """Looks at what a run's controller says, again and again.

    Args:
        supervisor: of the processes that run here; others are named, and left alone.
        hung_s: a replica is killed so long after its lease was lost.
        say: tells who started the run.
        controller_s: the controller is killed after so many seconds without a word from any, and
            one that stands by after as many without a word of its own.
        first_word_s: the same for a run of which no controller has said anything yet.
    """

    def __init__(
        self,
        supervisor: Supervisor,
        hung_s: float,
        say: Callable[[str], None],
        *,
        controller_s: float = _CONTROLLER_S,
        first_word_s: float = _FIRST_WORD_S,
    ) -> None:
        """Nobody has been looked at yet."""
        self._supervisor = supervisor
        self._hung_s = hung_s
        self._say = say
        self._controller_s = controller_s
        self._first_word_s = first_word_s
        self._told: set[str] = set()
        self._said_s = 0.0
        self._unsaid_s = 0.0
        self._standbys: dict[str, tuple[float, float]] = {}

    async def end(self, bus: Bus) -> None:
        """Say who hangs, and kill it when its time is over; for ever."""
        while True:
            await asyncio.sleep(_LOOK_S)
            try:
                self.look(await bus.read_status())
                mute = self.look_at_standbys(*await bus.read_standbys())
                if not (mute or self.is_mute) or await bus.refusal():
                    continue  # no room on a disk is what they wait for
                if self.is_mute:
                    self.end_controller()
                self.end_standbys(mute)
            except BusUnreachableError:
                continue

    @property
    def is_mute(self) -> bool:
        """Whether no controller has said anything for too long, and one runs here."""
        is_here = self._supervisor.pid(_CONTROLLER) is not None
        return is_here and self._unsaid_s >= self._longest_s

    @property
    def _longest_s(self) -> float:
        return self._controller_s if self._said_s else self._first_word_s

    def end_controller(self) -> None:
        """Kill it, unless it has been begun meanwhile."""
        self._unsaid_s = 0.0
        self._say(f"[yellow]no controller has said anything for {self._longest_s:g} s[/]")
        self._supervisor.end_hung(_CONTROLLER, time.time() - self._longest_s)

    def look_at_standbys(self, holder: str, said: Mapping[str, float]) -> list[str]:
        """Return who has to wait for the lease here, and has not said so for too long.

        Whoever had it and has it no more has to wait, too, if only to learn that the run is over.

        Args:
            holder: of the lease, who says other things; empty if nobody has it.
            said: when each that has ever waited last said so.
        """
        if holder:
            self._standbys.setdefault(holder, (0.0, 0.0))
        for name in self._standbys.keys() | said.keys():
            before_s, unsaid_s = self._standbys.get(name, (0.0, 0.0))
            said_s = said.get(name, 0.0)
            is_news = said_s != before_s or name == holder
            self._standbys[name] = (said_s, 0.0 if is_news else unsaid_s + _LOOK_S)
        mute = [name for name, (_, s) in self._standbys.items() if s >= self._controller_s]
        return [name for name in mute if self._supervisor.pid(name) is not None]

    def end_standbys(self, names: Sequence[str]) -> None:
        """Kill them, unless they have been begun meanwhile."""
        for name in names:
            self._standbys[name] = (self._standbys[name][0], 0.0)
            self._say(f"[yellow]{name}, which stands by, says nothing[/]")
            self._supervisor.end_hung(name, time.time() - self._controller_s)

    def look(self, status: Mapping[str, Any]) -> None:
        """Look at what the controller said last; called every second.

        While this process is suspended itself it does not look, and nothing counts as silence.

        Args:
            status: empty before the first word of any.
        """
        if not status:
            self._unsaid_s += _LOOK_S
            return
        said_s = status["time_s"]
        self._unsaid_s = self._unsaid_s + _LOOK_S if said_s == self._said_s else 0.0
        self._said_s = said_s
        silent: Mapping[str, float] = status.get("silent", {})
        for name in sorted(silent.keys() - self._told):
            what = f"; it is killed in {self._hung_s:g} s, unless it goes on"
            self._say(
                f"[yellow]{name} hangs: it has lost its lease, bus.lease_s without progress"
                f"{what if self._supervisor.pid(name) is not None else ''}[/]"
            )
        self._told = set(silent)
        for name, for_s in silent.items():
            if for_s >= self._hung_s:
                self._supervisor.end_hung(name, said_s - for_s)
