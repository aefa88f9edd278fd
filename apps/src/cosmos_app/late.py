"""Policies that do not end when their run has: killed when they give no sign of life any more.

::

    the controller ends ─► export, farewell ─► end
                        └─ silent for too long ─► named, killed, and not started again

The controller, who had their leases, hears nobody any more; what they go on saying is counted here.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from cosmos_app.supervisor import Supervisor
from cosmos_core.bus import Bus, BusUnreachableError
from cosmos_core.messages import Event, Progress, ReplicaJoined, ReplicaLeft

_LOOK_S = 1.0


class _Seen(NamedTuple):
    pid: int
    num_words: int
    silent_s: float


class LatePolicies:
    """Looks after the policies that run here, once their run has ended.

    Args:
        supervisor: of their processes.
        names: of theirs.
        silence_s: one that has said nothing for so long is killed.
        start_s: as much longer is given to one that has yet to load its model.
        say: tells who started the run.
    """

    def __init__(
        self,
        supervisor: Supervisor,
        names: Sequence[str],
        *,
        silence_s: float,
        start_s: float,
        say: Callable[[str], None],
    ) -> None:
        """Nobody has been looked at yet."""
        self._supervisor = supervisor
        self._names = names
        self._silence_s = silence_s
        self._start_s = start_s
        self._say = say
        self._seen: dict[str, _Seen] = {}

    async def end(self, bus: Bus) -> None:
        """Kill who is late and silent, for ever; nobody before the run has ended."""
        while True:
            await asyncio.sleep(_LOOK_S)
            try:
                status = await bus.read_status()
                if status.get("finished"):
                    self.look(status, await bus.unheard())
            except BusUnreachableError:
                continue

    def look(self, status: Mapping[str, Any], events: Sequence[Event]) -> None:
        """Look at what has been said since the run's end; called every second.

        While this process is suspended itself it does not look, and nothing counts as silence.

        Args:
            status: as the controller left it.
            events: that nobody heard.
        """
        words = (e for e in events if isinstance(e, Progress | ReplicaJoined | ReplicaLeft))
        counts = Counter(word.replica for word in words)
        for name in self._names:
            pid = self._supervisor.pid(name)
            if pid is None:
                continue
            before = self._seen.get(name) or self._first(name, pid, status)
            if before.pid != pid:  # it died, and was started again
                before = _Seen(pid, counts[name], -self._start_s)
            is_quiet = counts[name] == before.num_words
            silent_s = before.silent_s + _LOOK_S if is_quiet else 0.0
            self._seen[name] = _Seen(pid, counts[name], silent_s)
            if silent_s >= self._silence_s:
                self._say(
                    f"[yellow]{name} has not ended with its run, and has given no sign of life for "
                    f"{self._silence_s:g} s: it is killed[/]"
                )
                self._supervisor.give_up(name)

    def _first(self, name: str, pid: int, status: Mapping[str, Any]) -> _Seen:
        """Return how a policy is taken up: one that the controller did not know has yet to load."""
        is_known = name in {*status.get("replicas", {}), *status.get("silent", {})}
        return _Seen(pid, 0, 0.0 if is_known else -self._start_s)
