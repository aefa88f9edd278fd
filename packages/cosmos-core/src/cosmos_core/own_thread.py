"""A thread for calls that may last, which keeps no process from ending.

A pool of `concurrent.futures` would: Python waits for its threads before it ends, for ever if one
is in a call that never returns.
"""

import asyncio
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar, TypeVarTuple

T = TypeVar("T")
Ts = TypeVarTuple("Ts")
_Call = tuple[Callable[..., Any], tuple[Any, ...], Future[Any]]


class OwnThread:
    """Makes calls one after the other, in the order in which they were asked for."""

    def __init__(self, name: str) -> None:
        """Start the thread; it waits until it is told to `end`."""
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    async def run(self, function: Callable[[*Ts], T], *args: *Ts) -> T:
        """Call a function in the thread; what it raises is raised here."""
        future: Future[T] = Future()
        self._calls.put((function, args, future))
        return await asyncio.wrap_future(future)

    def end(self, *last: Callable[[], object]) -> None:
        """Have the thread end after these calls; waits for nothing."""
        for function in last:
            self._calls.put((function, (), Future()))
        self._calls.put(None)

    def join(self, timeout_s: float) -> None:
        """Wait for the end of the thread, for a while."""
        self._thread.join(timeout_s)

    def is_alive(self) -> bool:
        """Whether it has not ended yet."""
        return self._thread.is_alive()

    def _serve(self) -> None:
        while (call := self._calls.get()) is not None:
            function, args, future = call
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(function(*args))
            except StopIteration as error:  # which no future can hold
                future.set_exception(RuntimeError(f"it raised {error!r}"))
            except BaseException as error:  # noqa: BLE001 - it is raised where it was asked for
                future.set_exception(error)
            del call, args, future  # which may hold what is large while the thread waits
