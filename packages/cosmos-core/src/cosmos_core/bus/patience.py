"""How long a server is waited for that is away or refuses, and what to do about a refusal."""

import asyncio
import math
import time
from collections.abc import Callable

_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 1.0
_LONGEST_TRY_S = 15.0
_TOLD_S = 2.0

DISK_FULL = "MISCONF"
"""What is in each refusal of a server that cannot write to its disk."""

# Words of refusals that may pass, also where a script's error holds them; and what to do. Of some
# the client takes the code away, as CLUSTERDOWN: what stands behind it is looked for.
_PASSING = (
    ("maxmemory", "it holds as much as its maxmemory allows: raise that, or lower staleness.depth"),
    ("read only replica", "it is a replica of another server: give the address of its primary"),
    ("UNBLOCKED", "it has become a replica of another server: give the address of its primary"),
    (DISK_FULL, "it cannot write its data to disk: look at its disk and its log"),
    ("NOREPLICAS", "it wants replicas that are not there: see its min-replicas-to-write"),
    ("Link with MASTER", "it is a replica whose primary is away: give the address of the primary"),
    ("cluster is down", "it is of a cluster without some of its primaries: see CLUSTER INFO"),
    ("slot not served", "it is of a cluster without some of its primaries: see CLUSTER INFO"),
    (" is busy running", "it runs the script of somebody else, which ends by SCRIPT KILL"),
)


def advice_on(error: Exception) -> str:
    """Say what to do about a refusal that may pass; empty for any other."""
    said = str(error)
    return next((f"; {advice}" for words, advice in _PASSING if words in said), "")


class Patience:
    """The tries of one call, ever more slowly; made when the first one begins.

    A try that took longer than any can was one in which this process was suspended, by Ctrl-Z, a
    cluster or a virtual machine. It counts as one of 15 s: who was suspended for an hour has not
    waited for an hour, and tries again.

    Attributes:
        longest_s: how long to go on.
        waited_s: how long it went on so far.
    """

    def __init__(self, longest_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """Begin to wait; ``clock`` counts seconds."""
        self.longest_s = longest_s
        self._clock = clock
        self._pause_s = _FIRST_PAUSE_S
        self.waited_s = 0.0
        self._since_s = clock()

    def is_over(self, longest_s: float = 0.0) -> bool:
        """Whether another try would be too late.

        Args:
            longest_s: how long to go on, if that is longer.
        """
        now_s = self._clock()
        self.waited_s += min(now_s - self._since_s, _LONGEST_TRY_S)
        self._since_s = now_s
        return self.waited_s + self._pause_s > max(self.longest_s, longest_s)

    async def pause(self) -> None:
        """Wait before the next try, each time longer."""
        await asyncio.sleep(self._pause_s)
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)


class Outage:
    """Says that a server does not answer, once for all calls that wait for it, and that it does.

    A call that has waited for long says nothing while others were answered just now: what it failed
    of may be over.

    Args:
        address: of the server, for people.
        say: tells them.
        clock: counts seconds.
    """

    def __init__(
        self,
        address: str,
        say: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._address = address
        self._say = say
        self._clock = clock
        self._is_told = False
        self._answered_s = -math.inf

    def note(self, error: Exception, patience: Patience) -> None:
        """A call goes on trying: say why, unless that was said."""
        silent_s = min(patience.waited_s, self._clock() - self._answered_s)
        if not self._is_told and silent_s >= _TOLD_S:
            self._is_told = True
            left_s = patience.longest_s - patience.waited_s
            self._say(
                f"Redis at {self._address} does not answer ({error}); it is tried for another "
                f"{left_s:.0f} s"
            )

    def end(self) -> None:
        """It has answered."""
        self._answered_s = self._clock()
        if self._is_told:
            self._is_told = False
            self._say(f"Redis at {self._address} answers again")
