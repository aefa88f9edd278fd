"""Where tools that are ``async def`` run: an event loop in a thread of its own.

One that blocks, by ``time.sleep`` or a request that is not awaited, holds up no episode then, and
its time limit holds. All calls share the loop, so that what tools keep from one call for the next,
as a client of HTTP, goes on working.
"""

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")
_ANSWER_S = 1.0
"""A loop that turns takes up within this what it is given."""


class ToolLoop:
    """Begins its thread with the first call, and another one when a call blocks the one before.

    A thread cannot be ended from outside: one that is blocked ends when the calls in it have.
    """

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None

    async def run(self, work: Coroutine[Any, Any, T], timeout_s: float) -> T:
        """Return what the work returns.

        Raises:
            TimeoutError: if it takes longer; it is cancelled.
            Exception: whatever the work raises.
        """
        if self._loop is None or self._loop.is_closed():
            self._loop = _started()
        loop = self._loop
        waiting = asyncio.timeout(timeout_s)
        try:
            async with waiting:
                return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, loop))
        finally:
            if waiting.expired() and not await _turns(loop) and self._loop is loop:
                self.close()

    def close(self) -> None:
        """End the thread when its calls have; a later one begins another. Idempotent."""
        loop, self._loop = self._loop, None
        if loop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(_end, loop)


def _started() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=_turn, args=(loop,), name="tools", daemon=True).start()
    return loop


def _turn(loop: asyncio.AbstractEventLoop) -> None:
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        runner.get_loop().run_forever()


def _end(loop: asyncio.AbstractEventLoop) -> None:
    tasks = asyncio.all_tasks(loop)
    if tasks:
        tasks.pop().add_done_callback(lambda _: _end(loop))
    else:
        loop.stop()


async def _turns(loop: asyncio.AbstractEventLoop) -> bool:
    if loop.is_closed():
        return False
    answered = threading.Event()
    loop.call_soon_threadsafe(answered.set)
    return await asyncio.to_thread(answered.wait, _ANSWER_S)
