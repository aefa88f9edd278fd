"""A run whose disk is full: it is said, and the run goes on when there is room again.

Redis then takes no writes, so that every process waits for it; what the launcher writes itself it
tries again.
"""

import asyncio
import contextlib
import errno
from collections.abc import AsyncGenerator, Awaitable, Callable
from pathlib import Path

from rich.markup import escape

from cosmos_app.statuses import LOOK_S, each_second
from cosmos_core.bus import Bus

Say = Callable[[str], None]
Writing = Callable[[], None]

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})


def is_full_disk(error: BaseException) -> bool:
    """Whether an error says that a disk, or a quota, is full."""
    return isinstance(error, OSError) and error.errno in _FULL


async def _call(writing: Writing) -> None:
    writing()


class Writer:
    """Writes again what a full disk did not take, for as long as it is full.

    Args:
        where: the directory that is written to, for people.
        say: tells them.
        pause_s: seconds between two tries.
        call: calls what writes, perhaps in a thread of its own.
    """

    def __init__(
        self,
        where: Path,
        say: Say,
        *,
        pause_s: float = LOOK_S,
        call: Callable[[Writing], Awaitable[None]] = _call,
    ) -> None:
        self._where = where
        self._say = say
        self._pause_s = pause_s
        self._call = call

    async def write(self, writing: Writing) -> None:
        """Call what writes until it can.

        Raises:
            OSError: if it cannot for another reason.
        """
        is_told = False
        while True:
            try:
                await self._call(writing)
            except OSError as error:
                if not is_full_disk(error):
                    raise
                if not is_told:
                    self._say(
                        f"[yellow]{escape(str(self._where))}: {error.strerror}; metrics wait for "
                        "room there, free some[/]"
                    )
                is_told = True
                await asyncio.sleep(self._pause_s)
            else:
                if is_told:
                    self._say("there is room again: metrics are written")
                return


async def tell_refusals(bus: Bus, say: Say) -> None:
    """Say it when Redis begins to take no writes, and when it takes them again, for ever."""
    told = ""
    async for found in each_second(bus.refusal):
        if found and not told:
            say(f"[yellow]the run waits: {escape(found)}[/]")
        elif told and not found:
            say("Redis takes writes again: the run goes on")
        told = found


@contextlib.asynccontextmanager
async def refusals_told(bus: Bus, say: Say) -> AsyncGenerator[None]:
    """Have `tell_refusals` run inside the block."""
    telling = asyncio.create_task(tell_refusals(bus, say))
    try:
        yield
    finally:
        telling.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await telling
