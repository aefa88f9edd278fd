"""The launcher's side of `preloading`: replicas that are forked and not started anew."""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import msgspec

from cosmos_app.ahead import Ahead, start_importing
from cosmos_app.fork_orders import FORKED, PRELOADER, PRELOADER_OF_VLLM, Began, Ended, Order, Unfit

_ROLES = frozenset({"policy", "rollout", "teacher", "warmup", "learner", "wfm"})
_LEAST = 4  # words of a command line: Python's, "-m", the module and the role
_LONGEST_IMPORTS_S = 300.0


class Process(Protocol):
    """A child process, as asyncio has it."""

    @property
    def pid(self) -> int:
        """Its process id."""
        ...

    @property
    def returncode(self) -> int | None:
        """Exit code, a signal's number below zero, or None while it runs."""
        ...

    async def wait(self) -> int:
        """Return how it ended, when it has."""
        ...


class PreloadLostError(Exception):
    """The process that forks is gone, or was not done with its imports in time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Shared:
    """Replicas that come from one process, which has imported what they need.

    Attributes:
        modules: what it imports, ``module`` or ``module:name`` for one that imports its names when
            they are asked for. What cannot be imported is left out.
        roles: those of the replicas, as the command line has them.
        with_vllm: whether vLLM is among the modules.
    """

    modules: Sequence[str]
    roles: frozenset[str] = _ROLES
    with_vllm: bool = False


class ForkedProcess:
    """A process that was forked for the launcher."""

    def __init__(self, pid: int) -> None:
        """It runs."""
        self.pid = pid
        self.returncode: int | None = None
        self._over = asyncio.Event()

    async def wait(self) -> int:
        """Return how it ended, when it has."""
        await self._over.wait()
        assert self.returncode is not None
        return self.returncode

    def end(self, code: int) -> None:
        """Note how it ended."""
        self.returncode = code
        self._over.set()


class Preloaded:
    """A process that has imported what replicas do; those it is asked for begin at once."""

    def __init__(
        self,
        shared: Shared,
        environment: Mapping[str, str],
        say: Callable[[str], None] = lambda _: None,
        *,
        ahead: Ahead | None = None,
        longest_imports_s: float = _LONGEST_IMPORTS_S,
    ) -> None:
        """Start it; it imports while the launcher does other things.

        Args:
            shared: what it imports, and for whom.
            environment: of its imports, added to this process's own; what replicas are started
                with as well.
            say: told why nothing can be forked, if so.
            ahead: has imported a part of it, or is about to; it is forked from there.
            longest_imports_s: seconds that its imports may take.
        """
        self._say = say
        self._longest_imports_s = longest_imports_s
        self._process: subprocess.Popen[bytes] | None = None
        self._roles = shared.roles
        of_all = os.environ.get(PRELOADER)
        path = os.environ.get(PRELOADER_OF_VLLM, of_all) if shared.with_vllm else of_all
        found = _connected(path)
        found = found or (ahead and ahead.fork(shared.modules, environment))
        self._socket = found or self._begin(shared.modules, environment)
        self._is_lost = False
        self._connecting = asyncio.Lock()
        self._writer: asyncio.StreamWriter | None = None
        self._listening: asyncio.Task[None] | None = None
        self._number = 0
        self._asked: dict[int, asyncio.Future[ForkedProcess]] = {}
        self._running: dict[int, ForkedProcess] = {}

    def _begin(self, modules: Sequence[str], environment: Mapping[str, str]) -> socket.socket:
        own, theirs = socket.socketpair()
        with theirs:
            words = (str(theirs.fileno()), *modules)
            self._process = start_importing(words, theirs, environment)
        return own

    def takes(self, argv: Sequence[str]) -> bool:
        """Whether a command line is one of those that can be forked now."""
        if self._is_lost or len(argv) < _LEAST:
            return False
        return list(argv[:3]) == [sys.executable, "-m", FORKED] and argv[3] in self._roles

    async def start(
        self, argv: Sequence[str], environment: Mapping[str, str], log: Path
    ) -> ForkedProcess:
        """Have a process forked that does what a command line says.

        Args:
            argv: see ``takes``.
            environment: the whole of it.
            log: gets its standard output and error.

        Raises:
            PreloadLostError: if that cannot be; it can be started as others are then.
        """
        writer = await self._connect()
        self._number += 1
        order = Order(self._number, list(argv), dict(environment), str(log), str(Path.cwd()))
        began = self._asked[order.number] = asyncio.get_running_loop().create_future()
        try:
            writer.write(msgspec.json.encode(order) + b"\n")
            return await asyncio.wait_for(began, self._longest_imports_s)
        except (OSError, TimeoutError) as error:
            self._lose()
            raise PreloadLostError from error

    async def close(self) -> None:
        """End the process; what it forked has ended, or ends with it."""
        self._lose()
        if self._listening is not None:
            self._listening.cancel()
            await asyncio.gather(self._listening, return_exceptions=True)
        if self._writer is None:
            self._socket.close()
        else:
            self._writer.close()

    async def _connect(self) -> asyncio.StreamWriter:
        async with self._connecting:
            if self._is_lost:
                raise PreloadLostError
            if self._writer is None:
                reader, self._writer = await asyncio.open_unix_connection(sock=self._socket)
                self._listening = asyncio.create_task(self._listen(reader))
            return self._writer

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        with contextlib.suppress(OSError):
            while line := await reader.readline():
                self._hear(msgspec.json.decode(line, type=Began | Ended | Unfit))
        self._lose()

    def _hear(self, answer: Began | Ended | Unfit) -> None:
        if isinstance(answer, Unfit):
            self._say(f"each replica starts by itself, which takes longer: {answer.why}")
            return
        if isinstance(answer, Ended):
            self._running.pop(answer.number).end(answer.code)
            return
        process = self._running[answer.number] = ForkedProcess(answer.pid)
        asked = self._asked.pop(answer.number)
        if not asked.done():
            asked.set_result(process)

    def _lose(self) -> None:
        self._is_lost = True
        if self._process is not None:
            self._process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(1.0)
        for asked in self._asked.values():
            if not asked.done():
                asked.set_exception(PreloadLostError())
        self._asked.clear()
        for process in self._running.values():
            process.end(-signal.SIGKILL)
        self._running.clear()


def _connected(path: str | None) -> socket.socket | None:
    """Return a connection to who has imported everything, if there is one there."""
    if not path:
        return None
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(path)
    except OSError:
        connection.close()
        return None
    return connection


@contextlib.asynccontextmanager
async def preloading(
    shared: Sequence[Shared],
    environment: Mapping[str, str],
    say: Callable[[str], None] = lambda _: None,
    ahead: Ahead | None = None,
) -> AsyncGenerator[Sequence[Preloaded]]:
    """Give a process for each, but for those with nothing to import; none where that cannot be.

    Args:
        shared: of the replicas of a run.
        environment: see `Preloaded`.
        say: likewise.
        ahead: likewise; it is ended if there is nothing to import.
    """
    can_be = hasattr(os, "pidfd_open")
    wanted = [each for each in shared if each.modules and can_be]
    preloaded = [Preloaded(each, environment, say, ahead=ahead) for each in wanted]
    if ahead is not None and not wanted:
        ahead.close()
    try:
        yield preloaded
    finally:
        for each in preloaded:
            await each.close()
