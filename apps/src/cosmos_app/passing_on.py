"""What is measured in a run goes from its Redis to its sinks, which have a thread of their own.

A sink may wait for its service for minutes, as MLflow's client does where that is gone. Meanwhile a
run is looked after, and can be stopped and killed.
"""

import asyncio
import contextlib
import functools
import math
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import TypeVar

from rich.console import Console

from cosmos_app.ended_by import ended_by
from cosmos_app.errors import RunError
from cosmos_app.full_disk import Writer
from cosmos_core.bus import Bus
from cosmos_core.metrics import MetricRecord, MetricSink, SinkConfig, SinkContext, open_sinks
from cosmos_core.own_thread import OwnThread

_LAST_METRICS_S = 30.0
_LOOK_S = 0.05
_KILLED_S = 5.0

Answer = TypeVar("Answer")


class _SinkThread:
    """Makes the calls of sinks; tells whether somebody waits for one."""

    def __init__(self) -> None:
        self._thread = OwnThread("sinks")
        self._num_waiting = 0

    @property
    def is_busy(self) -> bool:
        """Whether somebody waits for a call."""
        return self._num_waiting > 0

    async def call(self, function: Callable[[], Answer]) -> Answer:
        """Return what a function does there; who is cancelled meanwhile does not wait for it."""
        self._num_waiting += 1
        try:
            return await self._thread.run(function)
        finally:
            self._num_waiting -= 1

    def end(self) -> None:
        """Have the thread end after the calls that were made."""
        self._thread.end()


@contextlib.asynccontextmanager
async def passing_metrics_on(
    bus: Bus,
    configs: Sequence[SinkConfig],
    context: SinkContext,
    look: Callable[[MetricRecord], None],
) -> AsyncGenerator[None]:
    """Have what is measured inside go to the sinks, to the last record.

    Args:
        bus: of the run.
        configs: of the sinks.
        context: what they are told about the run.
        look: called with every record that was written.

    Raises:
        RunError: from inside, as soon as a sink fails.
    """
    thread = _SinkThread()
    try:
        sinks = await thread.call(functools.partial(open_sinks, configs, context))
        async with _closed(sinks, thread, context.console):
            passing = asyncio.create_task(_pass_on(bus, sinks, thread, context, look))
            async with ended_by(passing, _unwritten):
                yield
                await _await_passed_on(bus, thread)
    finally:
        thread.end()


async def _pass_on(
    bus: Bus,
    sinks: MetricSink,
    thread: _SinkThread,
    context: SinkContext,
    look: Callable[[MetricRecord], None],
) -> None:
    say = functools.partial(context.console.print, soft_wrap=True)
    writer = Writer(context.run.path, say, call=thread.call)
    async for record in bus.metrics():
        await writer.write(functools.partial(sinks.write, record))
        look(record)


def _unwritten(error: BaseException) -> RunError:
    return RunError(
        f"metrics cannot be written any more, so the run was ended; mend that and go on with "
        f"--resume: {type(error).__name__}: {error}"
    )


@contextlib.asynccontextmanager
async def _closed(sinks: MetricSink, thread: _SinkThread, console: Console) -> AsyncGenerator[None]:
    """Close sinks in the end; an error of theirs there is not told in place of one before it.

    Those of a run that is killed are not waited for if they wait themselves.

    Raises:
        RunError: if they cannot bring to where it goes what they held back.
    """
    try:
        yield
    except BaseException as error:
        longest_s = _KILLED_S if isinstance(error, asyncio.CancelledError) else None
        with contextlib.suppress(Exception):
            await asyncio.wait_for(thread.call(sinks.close), longest_s)
        console.show_cursor()
        raise
    try:
        await thread.call(sinks.close)
    except Exception as error:
        raise RunError(
            f"the last metrics cannot be written; mend that and go on with --resume: "
            f"{type(error).__name__}: {error}"
        ) from error


async def _await_passed_on(bus: Bus, thread: _SinkThread) -> None:
    """Return when the sinks have everything that was measured, or take nothing for a while."""
    num_looks = 0
    while num_looks < math.ceil(_LAST_METRICS_S / _LOOK_S) and await bus.num_metrics():
        num_looks += not thread.is_busy
        await asyncio.sleep(_LOOK_S)
