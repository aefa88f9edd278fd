"""A replica's lease: renewed while it gets further; if it does not for too long, it ends itself.

::

    progress, or nothing to do ─► Progress ─► the controller renews the lease
    neither, for silence_s ─► stacks of all threads, and the end of the process ─► started again
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from pathlib import Path
from typing import NamedTuple, Protocol

from cosmos_app.progress_watch import ProgressWatch
from cosmos_app.recipe import LaunchConfig
from cosmos_core.messages import Event, Progress


class Standing(NamedTuple):
    """Where a replica is.

    Attributes:
        progress: grows with what it does.
        is_busy: whether it has something to do.
    """

    progress: int
    is_busy: bool


class Sender(Protocol):
    """What is used of a `ReplicaChannel`."""

    async def send(self, event: Event) -> None:
        """Tell the controller."""
        ...


@contextlib.contextmanager
def watch_start(replica: str, launch: LaunchConfig) -> Generator[ProgressWatch]:
    """End this process if it takes longer to start than it may, inside the block or until a rest.

    Args:
        replica: its name.
        launch: says how long.
    """
    with ProgressWatch(replica, launch.start_s) as watch:
        watch.at("its start (launch.start_s)")
        yield watch


@contextlib.contextmanager
def watch_saving(replica: str, launch: LaunchConfig, where: Path | str) -> Generator[None]:
    """End this process if it takes longer to write than it may, inside the block.

    Args:
        replica: its name.
        launch: says how long.
        where: it writes to, for people.
    """
    with ProgressWatch(replica, launch.save_s) as watch:
        watch.at(f"writing to {where} (launch.save_s)")
        yield


async def keep_lease(
    channel: Sender,
    replica: str,
    standing: Callable[[], Standing],
    silence_s: float,
    pulse_s: float = 2.0,
) -> None:
    """Renew a lease for ever, and end this process where it cannot be renewed.

    Args:
        channel: of the replica.
        replica: its name.
        standing: tells where it is; asked again and again.
        silence_s: longest that it may be busy without progress, or this loop not be run at all.
        pulse_s: how often it is asked.
    """

    async def renew(count: int) -> None:
        await channel.send(Progress(replica=replica, count=count))

    await watch_work(replica, standing, silence_s, pulse_s, renew=renew)


@contextlib.asynccontextmanager
async def watched_work(
    replica: str,
    standing: Callable[[], Standing],
    silence_s: float,
    *,
    part: str = "what it was given",
) -> AsyncGenerator[None]:
    """End this process if it gets no further, inside the block; arguments as of `watch_work`."""
    watching = asyncio.create_task(watch_work(replica, standing, silence_s, part=part))
    try:
        yield
    finally:
        watching.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watching


async def watch_work(
    replica: str,
    standing: Callable[[], Standing],
    silence_s: float,
    pulse_s: float = 2.0,
    *,
    part: str = "what it was given",
    renew: Callable[[int], Awaitable[None]] | None = None,
) -> None:
    """End this process if it gets no further; for ever.

    Args:
        replica: what it is.
        standing: tells where it is; asked again and again.
        silence_s: longest that it may be busy without progress, or this loop not be run at all.
        pulse_s: how often it is asked.
        part: of its work, for people: what it may not take so long for.
        renew: told of progress, and that there is nothing to do; it may take its time.
    """
    before = -1
    with ProgressWatch(replica, silence_s) as watch:
        watch.at("what it began with")
        while True:
            now = standing()
            if now.progress != before or not now.is_busy:
                before = now.progress
                if renew is not None:
                    watch.rest()  # waiting for Redis has a deadline of its own
                    await renew(before)
                watch.at(part)
            await asyncio.sleep(pulse_s)
