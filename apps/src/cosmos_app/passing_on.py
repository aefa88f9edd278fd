"""What is measured in a run goes from its Redis to its sinks, which have a thread of their own.

A sink may wait for its service for minutes, as MLflow's client does where that is gone. Meanwhile a
run is looked after, and can be stopped and killed. When it is over a sink is waited for as long as
it takes records, but not for one that hangs over one.
"""

import asyncio
import contextlib
import functools
import math
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import TypeVar

from rich.console import Console

from cosmos_app.ended_by import ended_by
from cosmos_app.errors import HungSinkError, RunError
from cosmos_app.full_disk import Writer
from cosmos_core.bus import Bus
from cosmos_core.metrics import FanOut, MetricRecord, SinkConfig, SinkContext, open_sinks
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
        self._num_looks = 0

    def look(self) -> int:
        """Return for how many looks, with this one, somebody waits for the same call; 0 if not.

        Looks are counted, not seconds: who was suspended has not waited.
        """
        self._num_looks += 1
        return self._num_looks if self._num_waiting else 0

    async def call(self, function: Callable[[], Answer]) -> Answer:
        """Return what a function does there; who is cancelled meanwhile does not wait for it."""
        self._num_waiting += 1
        self._num_looks = 0
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
    *,
    longest_s: float,
) -> AsyncGenerator[None]:
    """Have what is measured inside go to the sinks, to the last record.

    Args:
        bus: of the run.
        configs: of the sinks.
        context: what they are told about the run.
        look: called with every record that was written.
        longest_s: how long a sink may take for one record, or to be closed, after that.

    Raises:
        RunError: from inside, as soon as a sink fails.
        HungSinkError: after that, if one takes too long.
    """
    thread = _SinkThread()
    try:
        sinks = await thread.call(functools.partial(open_sinks, configs, context))
        async with _closed(sinks, thread, context.console, longest_s):
            passing = asyncio.create_task(_pass_on(bus, sinks, thread, context, look))
            async with ended_by(passing, _unwritten):
                yield
                await _await_passed_on(bus, sinks, thread, longest_s)
    finally:
        thread.end()


async def _pass_on(
    bus: Bus,
    sinks: FanOut,
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
async def _closed(
    sinks: FanOut, thread: _SinkThread, console: Console, longest_s: float
) -> AsyncGenerator[None]:
    """Close sinks in the end; an error of theirs there is not told in place of one before it.

    Those of a run that is killed are not waited for if they wait themselves, nor those that hang.

    Raises:
        RunError: if they cannot bring to where it goes what they held back.
        HungSinkError: if one does not return.
    """
    try:
        yield
    except BaseException as error:
        is_short = isinstance(error, asyncio.CancelledError | HungSinkError)
        with contextlib.suppress(Exception):
            await _close(sinks, thread, _KILLED_S if is_short else longest_s)
        console.show_cursor()
        raise
    try:
        await _close(sinks, thread, longest_s)
    except HungSinkError:
        raise
    except Exception as error:
        raise RunError(
            f"the last metrics cannot be written; mend that and go on with --resume: "
            f"{type(error).__name__}: {error}"
        ) from error


async def _close(sinks: FanOut, thread: _SinkThread, longest_s: float) -> None:
    """Close sinks, or raise `HungSinkError`."""
    closing = asyncio.create_task(thread.call(sinks.close))
    try:
        while not (await asyncio.wait((closing,), timeout=_LOOK_S))[0]:
            if thread.look() * _LOOK_S > longest_s:
                raise HungSinkError(_hanging(sinks, "be closed", longest_s))
        await closing
    finally:
        closing.cancel()


async def _await_passed_on(bus: Bus, sinks: FanOut, thread: _SinkThread, longest_s: float) -> None:
    """Return when the sinks have everything that was measured, or take nothing for a while.

    Raises:
        HungSinkError: if one has been at the same record for too long.
    """
    num_idle = 0
    while num_idle < math.ceil(_LAST_METRICS_S / _LOOK_S) and (left := await bus.num_metrics()):
        num_looks = thread.look()
        if num_looks * _LOOK_S > longest_s:
            said = _hanging(sinks, "take a record", longest_s)
            raise HungSinkError(f"{said}; {left} records have yet to be acknowledged")
        num_idle += not num_looks
        await asyncio.sleep(_LOOK_S)


def _hanging(sinks: FanOut, what: str, longest_s: float) -> str:
    return (
        f"the run is over, and its sink {sinks.at} was waited for to {what} for {longest_s:g} s "
        "(launch.sink_s): what it writes to may not answer, and may not have all that was measured"
    )
