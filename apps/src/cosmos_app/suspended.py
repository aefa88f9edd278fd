"""Processes that are suspended and do not go on: killed, and started again as after a death.

For runs whose processes have no leases. One that writes for too long ends itself; one that is
suspended cannot, and lives, so that nobody would start it again.
"""

import asyncio
import math
from collections.abc import Callable

from cosmos_app.process_table import processes
from cosmos_app.supervisor import Supervisor

_LOOK_S = 1.0


class SuspendedProcesses:
    """Looks at the processes of a run, again and again; where there is no ``/proc`` it sees none.

    Args:
        supervisor: of the processes.
        hung_s: one that was suspended for so long is killed.
        say: tells who started the run.
    """

    def __init__(self, supervisor: Supervisor, hung_s: float, say: Callable[[str], None]) -> None:
        """Nobody has been looked at yet."""
        self._supervisor = supervisor
        self._hung_s = hung_s
        self._say = say
        self._suspended_s: dict[int, float] = {}

    async def end(self) -> None:
        """Kill who is suspended for too long, for ever."""
        while True:
            await asyncio.sleep(_LOOK_S)
            self.look()

    def look(self) -> None:
        """Look at all of them; called every second.

        While this process is suspended itself it does not look, and nothing counts.
        """
        sessions = {process.session for process in processes() if process.state == "T"}
        found = {
            pid: name
            for name in self._supervisor.running()
            if (pid := self._supervisor.pid(name)) is not None and pid in sessions
        }
        self._suspended_s = {pid: self._suspended_s.get(pid, 0.0) + _LOOK_S for pid in found}
        for pid, name in found.items():
            if self._suspended_s[pid] >= self._hung_s:
                self._say(f"[yellow]{name} is suspended, for {self._hung_s:g} s: it is killed[/]")
                self._supervisor.end_hung(name, math.inf)
