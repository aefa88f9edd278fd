"""The Redis server of a run: named when it does not answer, and started again where it is ours.

::

    answers ─► silent, told ─hung_s over─► killed ─┐
       │          └─ answers ─► the run goes on     ├─► started again where it was
       └─► dead ────────────────────────────────────┘
    another's server: silent, told ─ a minute over ─► the run ends

What calls Redis tries for a minute (`Bus`), so that nobody hears of one that was dead for seconds.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from pathlib import Path

from rich.markup import escape

from cosmos_app.ended_by import ended_by
from cosmos_app.errors import ChildFailedError
from cosmos_app.supervisor import Incident, Outcome, Restarts, describe_exit, log_tail
from cosmos_core.bus import Bus, BusUnreachableError, RedisServer, answers

NAME = "redis"
_LOOK_S = 1.0
_ANSWER_S = 2.0
_TOLD_S = 5.0
_LONGEST_LOOK_S = 5.0
_LEAST_HUNG_S = 10.0
_MOST_HUNG_S = 30.0
_GONE_S = 60.0
_LONGEST_PAUSE_S = 10.0  # who calls it meanwhile waits for a minute


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnServer:
    """A server that the launcher has started.

    Attributes:
        server: itself.
        log: what it writes.
        restarts: how often it is started again.
        hung_s: it is killed after so long without an answer.
    """

    server: RedisServer
    log: Path
    restarts: Restarts
    hung_s: float


def hung_after_s(lease_s: float) -> float:
    """Return how long a server may say nothing: a lease, but less than those wait who call it.

    It is silent for seconds also where it only deletes much, or waits for a slow disk.
    """
    return min(max(lease_s, _LEAST_HUNG_S), _MOST_HUNG_S)


class RedisWatch:
    """Looks at a run's server again and again.

    Args:
        bus: the run.
        own: the server, if it is the launcher's.
        say: tells who started the run.
        note: told of each unexpected end of ours.
        gone_s: a server of somebody else is given up after so long without an answer.
    """

    def __init__(
        self,
        bus: Bus,
        own: OwnServer | None,
        say: Callable[[str], None],
        note: Callable[[Incident], None],
        *,
        gone_s: float = _GONE_S,
    ) -> None:
        """Nothing has been looked at yet."""
        self._bus = bus
        self._own = own
        self._say = say
        self._note = note
        self._longest_s = gone_s if own is None else own.hung_s
        self._is_told = False
        self._silent_s = 0.0
        self._begun_s = time.monotonic()

    async def look_on(self) -> None:
        """Look for ever.

        Raises:
            BusUnreachableError: if the server of somebody else does not come back.
            ChildFailedError: if ours has died too often.
            ServerStartError: if it cannot be started again.
        """
        while True:
            before_s = time.monotonic()
            await asyncio.sleep(_LOOK_S)
            if self._own is not None and self._own.server.returncode is not None:
                await self._begin_anew(self._own, "")
            elif await answers(self._bus, _ANSWER_S):
                self._is_heard()
            else:
                # who was suspended between two looks has not listened for so long
                self._silent_s += min(time.monotonic() - before_s, _LONGEST_LOOK_S)
                await self._is_silent()

    def _is_heard(self) -> None:
        if self._is_told:
            self._say("Redis answers again: the run goes on")
        self._silent_s, self._is_told = 0.0, False

    async def _is_silent(self) -> None:
        if not self._is_told and self._silent_s >= min(_TOLD_S, self._longest_s):
            self._is_told = True
            then = "the run ends" if self._own is None else "it is killed and started again"
            self._say(
                f"[yellow]the run waits: Redis at {escape(self._bus.address)} does not answer; "
                f"{then} in {self._longest_s - self._silent_s:.0f} s, unless it does[/]"
            )
        if self._silent_s < self._longest_s:
            return
        if self._own is None:
            raise BusUnreachableError(
                f"Redis at {self._bus.address} did not answer for {self._longest_s:g} s, so the "
                "run was ended: is it running, or does it hang? What was saved is not lost, and "
                "--resume goes on from it"
            )
        if self._own.server.returncode is None:
            await self._begin_anew(self._own, ", as it hung")

    async def _begin_anew(self, own: OwnServer, reason: str) -> None:
        """Start our server again, with what it had; one that hangs is killed."""
        server = own.server
        pid, code = server.pid, server.kill()
        how = describe_exit(code) + reason
        pause_s = own.restarts.pause_after(code, time.monotonic() - self._begun_s)
        outcome: Outcome = "gave up" if pause_s is None else "restarted"
        self._note(Incident(time_s=time.time(), name=NAME, pid=pid, how=how, outcome=outcome))
        if pause_s is None:
            raise ChildFailedError(
                f"{NAME} died ({how}) and has no restarts left; nothing that was saved is lost, "
                f"and --resume goes on from it; the end of {own.log}:\n{log_tail(own.log)}"
            )
        await asyncio.sleep(min(pause_s, _LONGEST_PAUSE_S))
        server.restart()
        self._begun_s = time.monotonic()
        self._silent_s = 0.0


@contextlib.asynccontextmanager
async def redis_watched(watch: RedisWatch) -> AsyncGenerator[None]:
    """Have a watch look inside the block, which ends with its error."""
    looking = asyncio.create_task(watch.look_on())
    async with ended_by(looking):
        yield
