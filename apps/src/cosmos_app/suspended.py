"""Processes that are suspended and do not go on: killed, and started again as after a death.

One that hangs in its work ends itself; one that is suspended cannot, and lives, so that nobody
would start it again. Whoever started it looks: the launcher of a run without leases, and on
clusters, where nobody else sees it, `cosmos_app.kept` and `cosmos_app.torchrun`.
"""

import asyncio
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping

from cosmos_app.process_table import processes
from cosmos_app.supervisor import Supervisor, signal_session

PATIENCE = "COSMOS_SUSPENDED_S"
"""Variable of the environment: how long a process of a cluster may be suspended, in seconds."""

_LOOK_S = 1.0
_PATIENCE_S = 600.0


class Suspensions:
    """How long processes have been suspended; where there is no ``/proc``, none ever is.

    Args:
        longest_s: one that was suspended for so long is told of.
    """

    def __init__(self, longest_s: float) -> None:
        """Nobody has been looked at yet."""
        self._longest_s = longest_s
        self._suspended_s: dict[int, float] = {}

    def look(self, children: Callable[[], Mapping[int, str]]) -> list[tuple[int, str]]:
        """Return who is, or whose session has one who is, for too long, with the name.

        Called every second. While this process is suspended itself it does not look, and nothing
        counts.

        Args:
            children: returns the names of processes; asked only where somebody is suspended.
        """
        sessions = {process.session for process in processes() if process.state == "T"}
        names = children() if sessions else {}
        self._suspended_s = {
            pid: self._suspended_s.get(pid, 0.0) + _LOOK_S for pid in names if pid in sessions
        }
        late = [pid for pid, for_s in self._suspended_s.items() if for_s >= self._longest_s]
        return [(pid, names[pid]) for pid in late]


class SuspendedProcesses:
    """Looks at the processes of a run, again and again.

    Args:
        supervisor: of the processes.
        hung_s: one that was suspended for so long is killed.
        say: tells who started the run.
    """

    def __init__(self, supervisor: Supervisor, hung_s: float, say: Callable[[str], None]) -> None:
        """Nobody has been looked at yet."""
        self._supervisor = supervisor
        self._suspensions = Suspensions(hung_s)
        self._hung_s = hung_s
        self._say = say

    async def end(self) -> None:
        """Kill who is suspended for too long, for ever."""
        while True:
            await asyncio.sleep(_LOOK_S)
            self.look()

    def look(self) -> None:
        """Look at all of them; called every second."""
        for _, name in self._suspensions.look(self._names):
            self._say(f"[yellow]{_said(name, self._hung_s)}[/]")
            self._supervisor.end_hung(name, math.inf)

    def _names(self) -> dict[int, str]:
        return {
            pid: name
            for name in self._supervisor.running()
            if (pid := self._supervisor.pid(name)) is not None
        }


def watch_children(children: Callable[[], Mapping[int, str]]) -> None:
    """Kill children of this process that are suspended for too long, from now on, in a thread.

    Args:
        children: returns who leads a session of its own, by process id, with names for people.
    """
    longest_s = float(os.environ.get(PATIENCE, _PATIENCE_S))

    def watch() -> None:
        suspensions = Suspensions(longest_s)
        while True:
            time.sleep(_LOOK_S)
            for pid, name in suspensions.look(children):
                sys.stderr.write(f"{_said(name, longest_s)}\n")
                sys.stderr.flush()
                signal_session(pid, signal.SIGKILL)

    threading.Thread(target=watch, name="suspended", daemon=True).start()


def _said(name: str, longest_s: float) -> str:
    return f"{name} is suspended, for {longest_s:g} s: it is killed"
