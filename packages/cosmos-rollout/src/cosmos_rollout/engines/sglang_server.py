"""SGLang's server as a child process: started on a port of its own, watched, ended."""

import asyncio
import contextlib
import os
import secrets
import signal
import socket
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx

from cosmos_rollout.engine import KvPolicy
from cosmos_rollout.errors import EngineStartError

_CHILD = Path(__file__).with_name("sglang_child.py")
_LOOK_AGAIN_S = 0.2
_LAST_BYTES = 4000


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerUse:
    """How a server is started and spoken to; see `SGLangConfig`.

    Attributes:
        interpreter: Python that has SGLang; None: this one.
        arguments: options of its server, but for its address.
        kv: whether requests keep their keys and values when weights change.
        start_s: longest that a start may take.
        request_s: longest silence of the server.
        shutdown_s: longest clean end.
    """

    interpreter: Path | None
    arguments: Sequence[str]
    kv: KvPolicy
    start_s: float
    request_s: float
    shutdown_s: float


class SGLangServer:
    """A server that this process owns; made by `start_server`."""

    def __init__(
        self, process: asyncio.subprocess.Process, folder: Path, address: socket.socket, key: str
    ) -> None:
        """Take over a process that leads a group of its own.

        Args:
            process: listens at the address in the end.
            folder: has its log.
            address: bound to what the process listens at; closed with the server.
            key: whoever asks it for something has to show this.
        """
        self._process = process
        self._folder = folder
        self._address = address
        self.url = f"http://127.0.0.1:{address.getsockname()[1]}"
        self.headers = {"Authorization": f"Bearer {key}"}

    @property
    def folder(self) -> Path:
        """A place for files until the server has ended."""
        return self._folder

    @property
    def is_alive(self) -> bool:
        """Whether the process is there."""
        return self._process.returncode is None

    def last_words(self) -> str:
        """Return the end of what it wrote."""
        with (self._folder / "log").open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - _LAST_BYTES))
            return log.read().decode(errors="replace")

    async def listening(self, client: httpx.AsyncClient, deadline_s: float) -> None:
        """Return when it answers.

        Raises:
            EngineStartError: if it ends instead, or takes too long.
        """
        try:
            async with asyncio.timeout(deadline_s):
                while not await _answers(client):
                    if not self.is_alive:
                        raise EngineStartError(f"SGLang did not start:\n{self.last_words()}")
                    await asyncio.sleep(_LOOK_AGAIN_S)
        except TimeoutError as error:
            raise EngineStartError(
                f"SGLang does not answer after start_s = {deadline_s:g} s:\n{self.last_words()}"
            ) from error

    async def end(self, grace_s: float) -> None:
        """End it and its workers: SIGTERM, then SIGKILL to the whole group. Idempotent."""
        if self.is_alive:
            self._process.terminate()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._process.wait(), grace_s)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        await self._process.wait()  # it was killed
        self._address.close()


async def start_server(use: ServerUse, folder: Path) -> SGLangServer:
    """Start SGLang; it listens later.

    Args:
        use: how.
        folder: of its own, for its log and for weights.

    Raises:
        EngineStartError: if there is no such Python.
    """
    address = _reserved()
    python = str(use.interpreter or sys.executable)
    where = ("--host", "127.0.0.1", "--port", str(address.getsockname()[1]))
    key = secrets.token_urlsafe(32)
    with (folder / "log").open("wb") as log:
        try:
            process = await asyncio.create_subprocess_exec(
                *(python, str(_CHILD), str(os.getpid()), *use.arguments, *where),
                stdin=asyncio.subprocess.PIPE,  # for the key: command lines are public
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        except OSError as error:
            address.close()
            raise EngineStartError(f"interpreter {python}: {error}") from error
    assert process.stdin is not None
    process.stdin.write(key.encode())
    process.stdin.close()
    return SGLangServer(process, folder, address, key)


def _reserved() -> socket.socket:
    """Return a socket with a port of loopback that a server may share, and nobody else is given.

    SGLang binds its own after a minute of imports, with SO_REUSEADDR too; the kernel allows both as
    long as one of them listens.
    """
    address = socket.socket()
    address.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    address.bind(("127.0.0.1", 0))
    return address


def own_folder() -> tempfile.TemporaryDirectory[str]:
    """Return a folder in memory, if this system has such, that goes when it is closed."""
    memory = Path("/dev/shm")
    return tempfile.TemporaryDirectory(
        prefix="cosmos-sglang-", dir=memory if memory.is_dir() else None
    )


async def _answers(client: httpx.AsyncClient) -> bool:
    try:
        return (await client.get("/model_info")).is_success
    except httpx.HTTPError:
        return False
