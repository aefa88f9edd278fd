"""A process pool that outlives whatever ends its processes.

Pebble gives a whole pool up when a worker dies that has nothing to do, or when none can be started,
and what is then in its queue is never answered.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from typing import TypeVar

from pebble import ProcessPool

T = TypeVar("T")

_TRIES = 3
_LOOK_S = 1.0


class LastingPool:
    """Runs calls in worker processes; a pool that broke is replaced and its calls made again."""

    def __init__(self, make: Callable[[], ProcessPool]) -> None:
        """Make the first pool; its processes start with the first call."""
        self._make = make
        self._pool = make()
        self._endings: set[asyncio.Task[None]] = set()
        self._closed = False

    async def run(
        self, function: Callable[..., T], arguments: tuple[object, ...], timeout_s: float
    ) -> T:
        """Call a function in a worker.

        Args:
            function: importable where the workers are.
            arguments: of the call.
            timeout_s: counted from when a worker takes it; then the worker is killed.

        Raises:
            TimeoutError: it took too long.
            ProcessExpired: its worker died over it.
            BrokenProcessPool: no worker could be had, several times, or the pool was closed.
        """
        reason = "the pool was closed"
        for _ in range(_TRIES):
            if self._closed:
                break
            try:
                pool = self._working()
                try:
                    future = pool.schedule(function, arguments, timeout=timeout_s)
                except RuntimeError as error:  # it broke just now
                    raise BrokenProcessPool(str(error)) from error
                return await _answer(pool, future)
            except BrokenProcessPool as error:
                reason = str(error) or repr(error.__cause__)
        raise BrokenProcessPool(f"no worker process could be had: {reason}")

    async def aclose(self) -> None:
        """Drop what is pending and end the workers. Idempotent."""
        self._closed = True
        await asyncio.gather(asyncio.to_thread(_end, self._pool), *self._endings)

    def _working(self) -> ProcessPool:
        """Return the pool, or another one in its place if it broke."""
        if not self._pool.active:
            ending = asyncio.create_task(asyncio.to_thread(_end, self._pool))
            self._endings.add(ending)
            ending.add_done_callback(self._endings.discard)
            self._pool = self._make()
        return self._pool


async def _answer(pool: ProcessPool, future: Future[T]) -> T:
    """Wait for a call, and look whether there is still somebody to answer."""
    answer = asyncio.wrap_future(future)
    try:
        while not (await asyncio.wait([answer], timeout=_LOOK_S))[0]:
            if not pool.active:
                raise BrokenProcessPool("it broke with the call in its queue")
        return answer.result()
    finally:
        answer.cancel()  # of no effect on one that is done


def _end(pool: ProcessPool) -> None:
    pool.stop()
    pool.join()
