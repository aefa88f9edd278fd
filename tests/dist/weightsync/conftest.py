"""Real processes that tests talk to in JSON lines, each with a deadline and an end."""

import contextlib
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from subprocess import PIPE
from typing import Any

import pytest
from forked_scripts import ENGINES, SENDERS, TRAINERS, Forked, warm

import cosmos_weightsync

HERE = Path(__file__).parent
SOURCE = Path(cosmos_weightsync.__file__).parents[1]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Known where the tests of this folder are named on the command line."""
    parser.addoption("--weightsync-kills", type=int, help="processes to kill, 16 if omitted")
    parser.addoption(
        "--weightsync-all-families", action="store_true", help="an engine of each, not of three"
    )
    parser.addoption(
        "--weightsync-vllm", default="", help="a folder with the Python files of another vLLM"
    )


class Process:
    """A script of this folder; `ask` sends a command and waits for its answer."""

    def __init__(self, script: str, setup: dict[str, Any], first_on_path: str = "") -> None:
        path = os.pathsep.join(filter(None, [first_on_path, *sys.path]))
        origin = warm(_modules(script), {"PYTHONPATH": path})
        self._popen = Forked([HERE / script, json.dumps(setup)], origin, stdin=PIPE)
        self._answers: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._popen.stdout is not None
        for line in self._popen.stdout:
            if line.startswith("{"):
                self._answers.put(json.loads(line))
        self._answers.put(None)

    def tell(self, do: str, **arguments: Any) -> None:
        assert self._popen.stdin is not None
        print(json.dumps({"do": do, **arguments}), file=self._popen.stdin, flush=True)

    def answer(self, timeout_s: float = 240.0) -> dict[str, Any]:
        found = self._answers.get(timeout=timeout_s)
        assert found is not None, f"{self._popen.args} ended with {self._popen.wait(5)}"
        return found

    def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        self.tell(do, **arguments)
        return self.answer()

    def kill(self) -> None:
        """SIGKILL: no chance to say goodbye."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._popen.pid, signal.SIGKILL)
        self._popen.wait(10)

    def end(self) -> None:
        assert self._popen.stdin is not None
        assert self._popen.stdout is not None
        if self._popen.poll() is None:
            self.kill()
        with contextlib.suppress(BrokenPipeError):
            self._popen.stdin.close()
        self._reader.join(10)
        self._popen.stdout.close()


def _modules(script: str) -> Sequence[str]:
    """Return what is imported where a script is forked."""
    if script.startswith("vllm"):
        return ENGINES
    # what takes its own measure begins with what it needs alone
    return SENDERS if script.startswith("memory") else TRAINERS


class ForkedMember:
    """A member forked by `zygote_process.py`, and the connection to it."""

    def __init__(self, connection: socket.socket) -> None:
        connection.settimeout(120)
        self._connection = connection
        self._lines = connection.makefile("rw")
        self.pid = json.loads(self._lines.readline())["pid"]

    def tell(self, do: str, **arguments: Any) -> None:
        print(json.dumps({"do": do, **arguments}), file=self._lines, flush=True)

    def answer(self) -> dict[str, Any] | None:
        """``None`` if it is dead."""
        try:
            line = self._lines.readline()
        except ConnectionError:
            return None
        return json.loads(line) if line.endswith("\n") else None

    def ask(self, do: str, **arguments: Any) -> dict[str, Any] | None:
        self.tell(do, **arguments)
        return self.answer()

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    def close(self) -> None:
        self.kill()
        self._lines.close()
        self._connection.close()


class Zygote:
    """Forks senders and receivers: importing torch once is enough for all of them."""

    def __init__(self, address: Path) -> None:
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(address))
        self._listener.listen(8)
        self._listener.settimeout(120)
        self._popen = subprocess.Popen(
            [sys.executable, str(HERE / "zygote_process.py"), str(address)],
            stdin=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(SOURCE)},
        )

    def fork(self, **setup: Any) -> ForkedMember:
        """Start a member; `Member` of the script says what it is made of."""
        print(json.dumps(setup), file=self._popen.stdin, flush=True)
        connection, _ = self._listener.accept()
        return ForkedMember(connection)

    def close(self) -> None:
        assert self._popen.stdin is not None
        self._popen.stdin.close()
        self._popen.kill()  # It has nothing to lose.
        self._popen.wait(30)
        self._listener.close()


@pytest.fixture(scope="session")
def zygote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Zygote]:
    """Starts within seconds and forks within milliseconds."""
    found = Zygote(tmp_path_factory.mktemp("zygote") / "members")
    yield found
    found.close()


class Trainer:
    """All ranks of an FSDP2 trainer; every command goes to each of them."""

    def __init__(self, ranks: list[Process]) -> None:
        self.ranks = ranks
        self.states = [rank.answer() for rank in ranks]

    @property
    def endpoints(self) -> list[str]:
        return [state["endpoint"] for state in self.states]

    def tell(self, do: str, **arguments: Any) -> None:
        for rank in self.ranks:
            rank.tell(do, **arguments)

    def answers(self) -> list[dict[str, Any]]:
        return [rank.answer() for rank in self.ranks]

    def ask(self, do: str, **arguments: Any) -> list[dict[str, Any]]:
        self.tell(do, **arguments)
        return self.answers()


@pytest.fixture(scope="module")
def start(request: pytest.FixtureRequest) -> Iterator[Callable[[str, dict[str, Any]], Process]]:
    """Start a script of this folder; it is ended with the module."""
    other_vllm = request.config.getoption("--weightsync-vllm", default="")
    started: list[Process] = []

    def one(script: str, setup: dict[str, Any]) -> Process:
        started.append(Process(script, setup, other_vllm))
        return started[-1]

    yield one
    for process in started:
        process.end()


@pytest.fixture(scope="module")
def start_trainer(
    start: Callable[[str, dict[str, Any]], Process], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Trainer]:
    """Start all ranks of a trainer."""

    def trainer(num_ranks: int, model: str, options: dict[str, Any], **more: Any) -> Trainer:
        store = tmp_path_factory.mktemp("trainer") / "store"
        setup = {"num_ranks": num_ranks, "model": model, "options": options, "store": str(store)}
        return Trainer(
            [start("trainer_process.py", {**setup, **more, "rank": r}) for r in range(num_ranks)]
        )

    return trainer


@pytest.fixture(scope="module")
def start_receiver(
    start: Callable[[str, dict[str, Any]], Process],
) -> Callable[..., Process]:
    """Start a receiver of everything."""

    def receiver(endpoints: list[str], **config: Any) -> Process:
        process = start("receiver_process.py", {"endpoints": endpoints, "config": config})
        process.answer()
        return process

    return receiver
