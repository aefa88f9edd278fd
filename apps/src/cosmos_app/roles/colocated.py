"""A rollout replica whose engine sleeps whenever it has nothing to do, beside the policy.

commands ─► turn on the devices ─► wake (and load) ─► work until all is done ─► sleep ─► turn over
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from cosmos_app.errors import RunError
from cosmos_app.roles.turns import Turn
from cosmos_core.messages import Command, LoadFailed, LoadVersion
from cosmos_rollout import Producer, SleepingEngine, SleepPolicy

_LOOK_S = 0.01
_Load = Callable[[LoadVersion], Awaitable[None]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Bed:
    """What sleeps, and how.

    Attributes:
        engine: sleeps.
        producer: gives it work.
        turn: on the devices.
        weights: what becomes of them; those that it started with are always kept, since nobody
            may serve them any more.
    """

    engine: SleepingEngine
    producer: Producer
    turn: Turn
    weights: SleepPolicy


class Sleeper:
    """Passes commands on to an engine that is awake, and puts it to sleep after them.

    Args:
        bed: what sleeps, and how.
        take: hands a command other than `LoadVersion` to whom it is for.
        report: is told what sleeping and waking took, in seconds.
    """

    def __init__(
        self,
        bed: Bed,
        *,
        take: Callable[[Command], None],
        report: Callable[[dict[str, float]], Awaitable[None]],
    ) -> None:
        self._bed = bed
        self._take = take
        self._report = report
        self._commands: asyncio.Queue[Command] = asyncio.Queue()
        self._loaded: LoadVersion | None = None

    def hand(self, command: Command) -> None:
        """Take a command on; it is obeyed when it is this replica's turn."""
        self._commands.put_nowait(command)

    async def alternate(self, load: _Load) -> None:
        """Work and sleep, for ever.

        Args:
            load: fetches weights, and says so.

        Raises:
            RunError: if the policy did not let go of the devices in time, or weights that were
                given up for it cannot be had again.
            EngineError: if the engine died of it.
        """
        await self._sleep()
        while True:
            command = await self._commands.get()
            await self._wake(command)
            await self._work(command, load)
            await self._sleep()

    async def _work(self, command: Command, load: _Load) -> None:
        """Obey, and go on as long as something is to be done."""
        await self._obey(command, load)
        while self._bed.producer.num_groups or not self._commands.empty():
            try:
                async with asyncio.timeout(_LOOK_S):
                    command = await self._commands.get()
            except TimeoutError:
                continue
            await self._obey(command, load)

    async def _obey(self, command: Command, load: _Load) -> None:
        if isinstance(command, LoadVersion):
            self._loaded = command
            await load(command)
        else:
            self._take(command)

    async def _wake(self, command: Command) -> None:
        waited_s = await self._bed.turn.take()
        begun = time.monotonic()
        await self._bed.engine.wake()
        had = self._loaded if self._bed.weights == "discard" else None
        if had is not None and not isinstance(command, LoadVersion):
            event = await self._bed.producer.load(had)
            if isinstance(event, LoadFailed):  # the engine would wait for them for ever
                raise RunError(f"weights given up to sleep cannot be had again: {event.reason}")
        await self._report({"turn_s": waited_s, "wake_s": time.monotonic() - begun})

    async def _sleep(self) -> None:
        begun = time.monotonic()
        fetched = self._loaded is not None
        await self._bed.engine.sleep(self._bed.weights if fetched else "keep")
        self._bed.turn.give()
        await self._report({"sleep_s": time.monotonic() - begun})
