"""A process pool that outlives whatever ends its processes.

Pebble gives a whole pool up when a worker dies that has nothing to do, or when none can be started,
and what is then in its queue is never answered.
"""

import asyncio
import multiprocessing
import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any, TypeVar

from pebble import ProcessPool

from cosmos_rollout.one_loop import OneLoop
from cosmos_rollout.script_guard import IF_MAIN, lacking_guard
from cosmos_rollout.tether import start_worker
from cosmos_rollout.user_code import words_of

T = TypeVar("T")

_TRIES = 3
_LOOK_S = 1.0
_NO_FILE = (
    "each begins by importing the script that was started, and {} is no file, as when it is read "
    "from standard input: put it into one"
)
_DAEMON = (
    "this process is a daemon, as workers of multiprocessing.Pool and of a DataLoader are, and may "
    "not have processes of its own: use concurrent.futures.ProcessPoolExecutor, or daemon=False"
)


class UnsendableError(Exception):
    """Raised for a call that pickle cannot take to another process."""


class LastingPool:
    """Runs calls in worker processes; a pool that broke is replaced and its calls made again.

    Processes come from a fork server, which is a fresh interpreter: they share neither threads nor
    devices with this process, and they end when it ends, however it ends.
    """

    def __init__(self, num_workers: int, *, memory_mib: int, preload: Sequence[str]) -> None:
        """Make the first pool; its processes start with the first call.

        Args:
            num_workers: processes that work at once.
            memory_mib: data memory of each; 0: no limit.
            preload: modules that the fork server imports for all of them.
        """
        self._num_workers = num_workers
        self._memory_bytes = memory_mib << 20
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([*preload])
        self._pool = self._make()
        self._endings: set[asyncio.Task[None]] = set()
        self._loop = OneLoop("this pool of worker processes")
        self._closed = False
        self._unguarded = lacking_guard()

    async def run(
        self, function: Callable[..., T], arguments: tuple[object, ...], timeout_s: float
    ) -> T:
        """Call a function in a worker.

        Args:
            function: importable where the workers are; it raises nothing.
            arguments: of the call.
            timeout_s: counted from when a worker takes it; then the worker is killed.

        Raises:
            TimeoutError: it took too long.
            ProcessExpired: its worker died over it.
            BrokenProcessPool: no worker could be had, several times or for a reason that stays, or
                the pool was closed.
            UnsendableError: the arguments cannot be pickled, or not be read there.
            WrongLoopError: another event loop uses the pool at this moment.
        """
        self._loop.check_if_runs()
        if multiprocessing.current_process().daemon:
            raise BrokenProcessPool(_DAEMON)
        if self._unguarded:
            raise BrokenProcessPool(f"no worker process could be had: {self._unguarded}")
        packed = _packed(function, arguments)
        reason = "the pool was closed"
        for _ in range(_TRIES):
            if self._closed:
                break
            try:
                pool = self._working()
                try:
                    future = pool.schedule(_call, (packed,), timeout=timeout_s)
                except RuntimeError as error:  # it broke just now
                    raise BrokenProcessPool(str(error)) from error
                return await _answer(pool, future)
            except BrokenProcessPool as error:
                reason = f"{str(error) or repr(error.__cause__)}; {_advice()}"
        raise BrokenProcessPool(f"no worker process could be had: {reason}")

    async def aclose(self) -> None:
        """Drop what is pending and end the workers. Idempotent."""
        self._closed = True
        await asyncio.gather(asyncio.to_thread(_end, self._pool), *self._endings)

    def _make(self) -> ProcessPool:
        return ProcessPool(
            max_workers=self._num_workers,
            initializer=start_worker,
            initargs=(os.getpid(), self._memory_bytes),
            context=self._context,
        )

    def _working(self) -> ProcessPool:
        """Return the pool, or another one in its place if it broke."""
        if not self._pool.active:
            ending = asyncio.create_task(asyncio.to_thread(_end, self._pool))
            self._endings.add(ending)
            ending.add_done_callback(self._endings.discard)
            self._pool = self._make()
        return self._pool


def _packed(function: Callable[..., object], arguments: tuple[object, ...]) -> bytes:
    """Pickle a call here: what goes wrong in a thread or a process of Pebble's ends its pool."""
    try:
        return bytes(ForkingPickler.dumps((function, arguments)))
    except Exception as error:  # classes of the user's may raise anything
        raise UnsendableError(words_of(error)) from error


def _call(packed: bytes) -> Any:  # what the function returns
    """Make a call in a worker."""
    try:
        function, arguments = ForkingPickler.loads(packed)  # pyright: ignore[reportAttributeAccessIssue] its class passes for data
    except Exception as error:  # likewise
        raise UnsendableError(words_of(error)) from error
    return function(*arguments)


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


def _advice() -> str:
    """Return why workers may all end as they start."""
    script = getattr(sys.modules["__main__"], "__file__", None)
    if script is not None and not Path(script).exists():
        return _NO_FILE.format(script)
    return IF_MAIN  # Python's own words are above it, once for each process


def _end(pool: ProcessPool) -> None:
    pool.stop()
    pool.join()
