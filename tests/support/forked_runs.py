"""Commands that are forked from a process that has imported everything, with the face of `Popen`.

A run begins with ten CPU seconds of imports in its launcher and as many for its replicas. Tests
start hundreds of runs, and are not about that.
"""

import atexit
import functools
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

import msgspec

from cosmos_app.children import QUIET
from cosmos_app.fork_orders import PRELOADER, PRELOADER_OF_VLLM, Began, Ended, Order
from cosmos_app.parent import as_parent
from cosmos_app.replica_modules import ENGINES, TRAINING, of_models
from cosmos_rollout import cpu_environment

MODULES = (
    "cosmos_app.launcher",
    "cosmos_app.given.launch",
    "cosmos_app.given.role",
    "cosmos_app.given.tasks",
    "cosmos_app.roles.policy",
    "cosmos_app.roles.rollout",
    "cosmos_app.roles.teacher",
    "cosmos_app.wfm.running",
    "cosmos_rollout.engines.transformers_engine",
    *TRAINING,
    *of_models([None]),
    "matplotlib.pyplot",
    "torch.utils.tensorboard",
)
WITH_VLLM = (
    "cosmos_app.cli",
    "cosmos_app.roles.rollout",
    "cosmos_app.roles.teacher",
    *ENGINES["vllm"],
)
_LONGEST_IMPORTS_S = 240.0


@functools.cache
def preloader(modules: Sequence[str] = MODULES, first: str = "") -> str:
    """Return the socket of who has imported all of some modules; it ends with this process.

    Args:
        modules: what it imports.
        first: where it imports from, as in ``PYTHONPATH``, before this process's own places.
    """
    path = Path(tempfile.mkdtemp(prefix="preloader-")) / "socket"
    process = subprocess.Popen(
        [sys.executable, "-m", "cosmos_app.preloading", str(path), *modules],
        stdin=subprocess.DEVNULL,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, [first, *sys.path])),
            **QUIET,
            **cpu_environment(),
            "OMP_NUM_THREADS": "1",
            **as_parent(),
        },
        start_new_session=True,
    )
    atexit.register(process.kill)
    end = time.monotonic() + _LONGEST_IMPORTS_S
    while not path.exists():
        assert process.poll() is None, "it could not import"
        assert time.monotonic() < end
        time.sleep(0.05)
    return str(path)


class ForkedCommand:
    """A command line of ours that runs, forked.

    Attributes:
        pid: its process; it leads a session.
        returncode: how it ended; None while it runs.
        stdout: None, as it goes into a file.
    """

    stdout = None

    def __init__(
        self, argv: Sequence[str], *, env: Mapping[str, str], cwd: Path, log: Path
    ) -> None:
        """Fork it.

        Args:
            argv: as `Popen` takes them; Python, ``-m`` and ``cosmos_app`` first.
            env: the whole of its environment.
            cwd: where it works.
            log: gets its standard output and error.
        """
        self.returncode: int | None = None
        self._log = log
        self._text = b""
        self._connection = socket.socket(socket.AF_UNIX)
        first = env.get("PYTHONPATH", "")
        environment = {**env, PRELOADER: preloader(MODULES, first)}
        if find_spec("vllm") is not None:
            environment[PRELOADER_OF_VLLM] = preloader(WITH_VLLM, first)
        self._connection.connect(environment[PRELOADER])
        order = Order(0, list(argv), environment, str(log), str(cwd))
        self._connection.sendall(msgspec.json.encode(order) + b"\n")
        answer = self._hear(60.0)
        assert isinstance(answer, Began)
        self.pid = answer.pid

    def poll(self) -> int | None:
        """Return how it ended, or None while it runs."""
        if self.returncode is None and isinstance(answer := self._hear(0.0), Ended):
            self.returncode = answer.code
            self._connection.close()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Return how it ended, when it has."""
        end = time.monotonic() + (3600.0 if timeout is None else timeout)
        while self.poll() is None:
            left = end - time.monotonic()
            if left <= 0:
                raise subprocess.TimeoutExpired("cosmos-app", timeout or 0.0)
            select.select([self._connection], [], [], left)
        assert self.returncode is not None
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, None]:
        """Return what it wrote, when it has ended."""
        self.wait(timeout)
        return self._log.read_text(errors="replace"), None

    def send_signal(self, signum: signal.Signals | int) -> None:
        """Send it a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, signum)

    def kill(self) -> None:
        """Kill it."""
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        """Ask it to end."""
        self.send_signal(signal.SIGTERM)

    def _hear(self, longest_s: float) -> Began | Ended | None:
        """Return the next that is said of it; None if there is nothing in this time."""
        while b"\n" not in self._text:
            if not select.select([self._connection], [], [], longest_s)[0]:
                return None
            received = self._connection.recv(4096)
            assert received, "who forks has died"
            self._text += received
        line, _, self._text = self._text.partition(b"\n")
        return msgspec.json.decode(line, type=Began | Ended)
