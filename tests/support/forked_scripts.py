"""Scripts that are forked from a process that has imported what they do, with the face of `Popen`.

One that trains begins with ten CPU seconds of imports; one that serves a model by vLLM with twelve,
and as many in each process that vLLM starts. Who forks scripts lives as long as this process.
"""

import atexit
import contextlib
import functools
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from subprocess import PIPE, STDOUT, TimeoutExpired
from typing import TextIO

SENDERS = ("torch", "cosmos_weightsync.sender", "cosmos_weightsync.receiver")
"""What scripts import that send or receive weights, and no more."""
ENGINES = (
    *SENDERS,
    "transformers.models.auto.modeling_auto",
    "vllm.entrypoints.llm",
    "vllm.v1.engine.async_llm",
    "vllm.v1.engine.core",
    "vllm.v1.worker.cpu_worker",
    "cosmos_weightsync.integrations.vllm",
    "cosmos_weightsync.integrations.vllm_engine",
)
"""What scripts with vLLM import."""
TRAINERS = (
    *SENDERS,
    "cosmos_weightsync.encodings",
    "cosmos_weightsync.conversion",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torchtitan.models.llama3",
    "torchtitan.models.qwen3",
    "cosmos_parallel",
    "cosmos_algos",
    "cosmos_wfm",
    "cosmos_app.roles.policy",
    "cosmos_app.quickstart.tiny_model",
    "cosmos_parallel.native.building",
    "torchtitan.trainer",
    "transformers.models.auto.modeling_auto",
    "transformers.tokenization_mistral_common",
    "peft",
)
"""What all others import."""
_FORKER = Path(__file__).with_name("script_forker.py")
_LONGEST_IMPORTS_S = 240.0
# what no import asks for: these may be others than when their modules were imported
_READ_LATER = (
    *("PYTEST_", "COSMOS_PRELOADER", "VLLM_CPU_KVCACHE_SPACE", "VLLM_ENABLE_V1_MULTIPROCESSING"),
)
_WITH_VLLM = {
    "HF_HUB_OFFLINE": "1",
    "TORCHDYNAMO_DISABLE": "1",  # no C++ compilation
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
    "VLLM_NO_USAGE_STATS": "1",
}


@dataclass(frozen=True)
class Warm:
    """What a script is forked from.

    Attributes:
        modules: imported there; what is not installed is left out.
        environment: the whole of that of the script.
    """

    modules: Sequence[str]
    environment: Mapping[str, str]


def warm(modules: Sequence[str], more: Mapping[str, str] | None = None) -> Warm:
    """Return what scripts are forked from that find what this process does, and have one thread.

    Args:
        modules: imported there.
        more: of their environment.
    """
    path = os.pathsep.join(filter(None, sys.path))
    added = _WITH_VLLM if modules is ENGINES else {}
    added = {**added, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **(more or {})}
    return Warm(modules, {**os.environ, **added})


class Forked:
    """A script that runs, in a session of its own.

    Attributes:
        args: its command line.
        returncode: how it ended; None while it runs, as far as `poll` has seen.
        stdin: what it reads, where that is a pipe.
        stdout: what it writes, likewise.
    """

    def __init__(
        self,
        command: Sequence[object],
        origin: Warm,
        *,
        stdin: int | None = None,
        stdout: int = PIPE,
        stderr: int | None = None,
        directory: Path | None = None,
    ) -> None:
        """Order it; it begins when the modules are imported.

        Args:
            command: as of Python: a script or ``-m`` and a module, and arguments.
            origin: what it is forked from.
            stdin: a file, or `PIPE`; nothing if omitted.
            stdout: a file, or `PIPE`.
            stderr: a file, or `STDOUT`; that of this process if omitted.
            directory: where it works; where this process does if omitted.
        """
        self.args = [str(word) for word in command]
        self.returncode: int | None = None
        self._pid: int | None = None
        self._text = b""
        self.stdin: TextIO | None = None
        self.stdout: TextIO | None = None
        self._told, told = os.pipe()
        theirs = [told]
        if stdin is None:
            stdin = os.open(os.devnull, os.O_RDONLY)
            theirs.append(stdin)
        elif stdin == PIPE:
            stdin, given = os.pipe()
            self.stdin = os.fdopen(given, "w")
            theirs.append(stdin)
        if stdout == PIPE:
            written, stdout = os.pipe()
            self.stdout = os.fdopen(written)
            theirs.append(stdout)
        errors = 2 if stderr is None else stdout if stderr == STDOUT else stderr
        order = {
            "command": self.args,
            "environment": dict(origin.environment),
            "directory": str(directory or Path.cwd()),
        }
        socket.send_fds(
            _forker(tuple(origin.modules), frozenset(read_by_imports(origin.environment).items())),
            [json.dumps(order).encode()],
            [stdin, stdout, errors, told],
        )
        for file in theirs:
            os.close(file)

    @property
    def pid(self) -> int:
        """Its process, which leads a session."""
        if self._pid is None:
            self._pid = self._next_number(_LONGEST_IMPORTS_S)
        assert self._pid is not None, "what it needs is not imported in time"
        return self._pid

    def poll(self) -> int | None:
        """Return how it ended, or None while it runs."""
        with contextlib.suppress(TimeoutExpired):
            self.wait(0.0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Return how it ended, when it has.

        Raises:
            TimeoutExpired: it has not in this time.
        """
        if self.returncode is None and self.pid:
            self.returncode = self._next_number(timeout)
            if self.returncode is None:
                raise TimeoutExpired(self.args, timeout or 0.0)
            os.close(self._told)
        assert self.returncode is not None
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, None]:
        """Return all that it writes, of which nothing was read before, when it has ended.

        Raises:
            TimeoutExpired: it has not in this time.
        """
        end = None if timeout is None else time.monotonic() + timeout
        pieces: list[bytes] = []
        with self.stdout or contextlib.nullcontext() as output:
            while output is not None:
                if not select.select([output], [], [], _left(end))[0]:
                    raise TimeoutExpired(self.args, timeout or 0.0)
                pieces.append(os.read(output.fileno(), 1 << 16))
                if not pieces[-1]:
                    break
        self.wait(_left(end))
        return b"".join(pieces).decode(errors="replace"), None

    def send_signal(self, number: int) -> None:
        """Send it a signal, unless it has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill it."""
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        """Ask it to end."""
        self.send_signal(signal.SIGTERM)

    def _next_number(self, timeout: float | None) -> int | None:
        """Return what is told of it next, or None if nothing is in this time."""
        end = None if timeout is None else time.monotonic() + timeout
        while b"\n" not in self._text:
            if not select.select([self._told], [], [], _left(end))[0]:
                return None
            received = os.read(self._told, 64)
            assert received, "who forks has died"
            self._text += received
        line, _, self._text = self._text.partition(b"\n")
        return int(line)


def finished(command: Sequence[object], origin: Warm, deadline_s: float) -> str:
    """Return what a script writes that ends well in this time; all of its session ends then.

    Args:
        command: its command line.
        origin: what it is forked from.
        deadline_s: how long it may take.
    """
    process = Forked(command, origin, stderr=STDOUT)
    try:
        said, _ = process.communicate(deadline_s)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, said[-4000:]
    return said


def _left(end: float | None) -> float | None:
    return None if end is None else max(0.0, end - time.monotonic())


def read_by_imports(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the part of an environment that imports may ask for."""
    return {name: text for name, text in environment.items() if not name.startswith(_READ_LATER)}


@functools.cache
def _forker(modules: Sequence[str], environment: frozenset[tuple[str, str]]) -> socket.socket:
    """Return the socket of who has these modules imported under an environment."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        process = subprocess.Popen(
            [sys.executable, str(_FORKER), str(theirs.fileno()), *modules],
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )

    def end() -> None:
        ours.close()
        process.kill()
        process.wait(30)

    atexit.register(end)
    return ours
