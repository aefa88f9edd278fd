"""A process pool that outlives whatever ends its processes.

Pebble gives a whole pool up when a worker dies that has nothing to do, or when none can be started,
and what is then in its queue is never answered. It counts a call's time from when a worker takes
it: where the worker hangs that should, or the process that starts workers, nobody ever answers::

    call ─► waits ─► taken by a worker ─► answered, or ended for its time
              └─ by none, though one is free ─► another pool; what is under way here is waited for
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

from cosmos_rollout.fork_server import end_if_suspended
from cosmos_rollout.one_loop import OneLoop
from cosmos_rollout.script_guard import IF_MAIN, lacking_guard
from cosmos_rollout.tether import start_worker
from cosmos_rollout.user_code import words_of

T = TypeVar("T")

_TRIES = 3
_LOOK_S = 1.0
_TAKEN_S = 5.0  # a worker that is free takes a call, and a new one is forked, in milliseconds
_ENDED_S = 10.0  # Pebble asks a worker whose time is over to end for three
_START_S = 120.0
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

    def __init__(
        self,
        num_workers: int,
        *,
        memory_mib: int,
        preload: Sequence[str],
        start_s: float = _START_S,
    ) -> None:
        """Make the first pool; its processes start with the first call.

        Args:
            num_workers: processes that work at once.
            memory_mib: data memory of each; 0: no limit.
            preload: modules that the fork server imports for all of them.
            start_s: longest that a pool may take until it answers for the first time.
        """
        self._num_workers = num_workers
        self._memory_bytes = memory_mib << 20
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([*preload])
        self._start_s = start_s
        self._workers = self._make()
        self._retired: dict[asyncio.Task[None], _Workers] = {}
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
            timeout_s: counted from when a worker takes it; then the worker is killed. It may wait
                for other calls before that, but no longer than seconds for a worker that is free.

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
                workers = await self._working()
                return await workers.call(packed, timeout_s)
            except BrokenProcessPool as error:
                reason = f"{str(error) or repr(error.__cause__)}; {_advice()}"
        raise BrokenProcessPool(f"no worker process could be had: {reason}")

    async def aclose(self) -> None:
        """Drop what is pending and end the workers. Idempotent."""
        self._closed = True
        for workers in self._retired.values():
            workers.is_unused.set()
        await asyncio.gather(_ended(self._workers.pool), *self._retired)

    def _make(self) -> "_Workers":
        pool = ProcessPool(
            max_workers=self._num_workers,
            initializer=start_worker,
            initargs=(os.getpid(), self._memory_bytes),
            context=self._context,
        )
        return _Workers(pool, self._num_workers, self._start_s)

    async def _working(self) -> "_Workers":
        """Return the workers, or others in their place if their pool broke or was given up."""
        if self._workers.is_given_up:
            await asyncio.to_thread(end_if_suspended)  # the next pool would wait for it as well
        if self._workers.is_given_up or not self._workers.pool.active:
            self._workers.retire()
            ending = asyncio.create_task(self._workers.end())
            self._retired[ending] = self._workers
            ending.add_done_callback(self._retired.pop)
            self._workers = self._make()
        return self._workers


class _Workers:
    """One pool of Pebble's and the calls that it was given, all from one event loop.

    What is counted are looks, not seconds: a process that was suspended as a whole does not hang.

    Attributes:
        pool: of the processes.
        is_given_up: whether one of them hangs, so that other calls go elsewhere.
        is_unused: set when those under way need not be waited for any more.
    """

    def __init__(self, pool: ProcessPool, num_workers: int, start_s: float) -> None:
        self.pool = pool
        self.is_given_up = False
        self.is_unused = asyncio.Event()
        self._num_workers = num_workers
        self._start_s = start_s
        self._calls: set[Future[Any]] = set()
        self._num_over = 0
        self._has_answered = False

    async def call(self, packed: bytes, timeout_s: float) -> Any:  # what the function returns
        """Have a worker make a call.

        Raises:
            TimeoutError: it took too long.
            ProcessExpired: its worker died over it.
            BrokenProcessPool: no worker took it, or the pool broke.
        """
        try:
            future = self.pool.schedule(_call, (packed,), timeout=timeout_s)
        except RuntimeError as error:  # it broke just now
            raise BrokenProcessPool(str(error)) from error
        self._calls.add(future)
        try:
            return await self._answer(future, timeout_s)
        finally:
            self._calls.remove(future)
            self._num_over += 1
            if not self._calls:
                self.is_unused.set()

    def retire(self) -> None:
        """Get ready to `end`."""
        if any(future.running() for future in self._calls):
            self.is_unused.clear()
        else:
            self.is_unused.set()

    async def end(self) -> None:
        """Wait for the calls under way, and end the processes."""
        await self.is_unused.wait()
        await _ended(self.pool)

    async def _answer(self, future: Future[Any], timeout_s: float) -> Any:
        """Wait for a call, and look whether there is still somebody to answer."""
        answer = asyncio.wrap_future(future)
        running_s, free_s, num_over = 0.0, 0.0, self._num_over
        try:
            while not (await asyncio.wait([answer], timeout=_LOOK_S))[0]:
                if not self.pool.active:
                    raise BrokenProcessPool("it broke with the call in its queue")
                if future.running():
                    running_s += _LOOK_S
                    self._check_ended(running_s, timeout_s)
                    continue
                is_free = self._num_over == num_over and self._has_free_worker()
                free_s, num_over = free_s + _LOOK_S if is_free else 0.0, self._num_over
                self._check_taken(free_s)
            self._has_answered = True
            return answer.result()
        finally:
            answer.cancel()  # of no effect on one that is done

    def _has_free_worker(self) -> bool:
        return sum(future.running() for future in self._calls) < self._num_workers

    def _check_ended(self, running_s: float, timeout_s: float) -> None:
        if running_s > timeout_s + _ENDED_S:
            self.is_given_up = True
            raise TimeoutError("its worker could not be ended for its time")

    def _check_taken(self, free_s: float) -> None:
        longest_s = _TAKEN_S if self._has_answered else self._start_s
        self.is_given_up |= free_s >= longest_s
        if self.is_given_up:
            raise BrokenProcessPool(
                f"a worker process hangs, or the one that starts them: no free one took a call for "
                f"{longest_s:g} s"
            )


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


def _advice() -> str:
    """Return why workers may all end as they start."""
    script = getattr(sys.modules["__main__"], "__file__", None)
    if script is not None and not Path(script).exists():
        return _NO_FILE.format(script)
    return IF_MAIN  # Python's own words are above it, once for each process


async def _ended(pool: ProcessPool) -> None:
    """End a pool; the fork server may be stopped by a signal at any time until that is done."""
    ending = asyncio.ensure_future(asyncio.to_thread(_end, pool))
    while not (await asyncio.wait([ending], timeout=_LOOK_S))[0]:
        await asyncio.to_thread(end_if_suspended)
    await ending


def _end(pool: ProcessPool) -> None:
    end_if_suspended()  # it is asked how the workers ended
    pool.stop()
    pool.join()
