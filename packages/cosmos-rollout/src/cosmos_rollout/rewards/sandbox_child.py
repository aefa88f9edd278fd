"""The guard of a sandbox: shuts the doors, starts the program behind them, and watches it.

Run as a file by `sandbox`, with the standard library alone::

    python -I sandbox_child.py '{"program": "program.py", "timeout_s": 5.0, ...}'

    worker ──► guard ──► process 1 of a name space ──► the program
                 └── counts processes and time; holds the tests and what was answered to them

The program is in name spaces without a network, where process 1's death ends all it started, and
with a file system that is read-only (`sandbox_mounts`). Where the system does not allow name spaces
the guard exits with `NO_NAMESPACES`, unless it was told that less will do; then it ends the
program's processes one by one, none of which can leave it, and has the kernel refuse files by rules
(`sandbox_landlock`). The guard's memory and descriptors are closed to the program.
"""

import contextlib
import ctypes
import importlib.util
import json
import os
import re
import resource
import select
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

NO_NAMESPACES, OPEN_FILES, HALF_ENCLOSED = 117, 118, 119
TESTS_PLEASE = b"?"
_NEW_USER, _NEW_PROCESSES, _NEW_NETWORK, _NEW_IPC = 0x10000000, 0x20000000, 0x40000000, 0x08000000
_DIE_WITH_PARENT, _DUMPABLE, _FORGET_POWER, _ADOPT_ORPHANS, _NO_NEW_POWERS = 1, 4, 24, 36, 38
_POWERS_VERSION = 0x20080522
_OWN_USERS = 0x70000000
_COUNTED_BY_NAMESPACE = (5, 14)
_GUARDS = 2
_DEVICES = tuple(f"/dev/{name}" for name in ("null", "zero", "full", "random", "urandom", "tty"))
_LOOK_S = 0.01
_SAID_BYTES = 1 << 20


def limit(settings: dict[str, Any], *, is_counted_alone: bool) -> None:
    """Set what the program may use, in its own process.

    Args:
        settings: the limits.
        is_counted_alone: whether the kernel counts this program's processes apart from those that
            its user has elsewhere.
    """
    memory, file_bytes = settings["memory_bytes"], settings["file_bytes"]
    if is_counted_alone:
        most = settings["max_processes"] + _GUARDS
        resource.setrlimit(resource.RLIMIT_NPROC, (most, most))
    resource.setrlimit(resource.RLIMIT_CPU, (settings["cpu_s"], settings["cpu_s"] + 1))
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, file_bytes))
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


class Watch:
    """The guard's eye on one program: its end, its processes, its time, its words.

    Attributes:
        said: what the program sent about its tests.
        too_many: whether it was ended for the number of its processes.
    """

    def __init__(self, settings: dict[str, Any], child: int, line: socket.socket) -> None:
        """Begin with the clock."""
        self.said = bytearray()
        self.too_many = False
        self._settings = settings
        self._child = child
        self._end = os.pidfd_open(child)
        self._line = line
        self._line.setblocking(False)
        self._unsent = b""
        self._is_open = True
        self._told_to_end = False
        self._deadline = time.monotonic() + settings["timeout_s"]
        signal.signal(signal.SIGTERM, self._end_soon)

    def until_end(self) -> int | None:
        """Return the program's exit status, or None if it was ended for its limits."""
        try:
            while time.monotonic() < self._deadline and not self._told_to_end:
                status = self._reaped()
                self._talk(_LOOK_S if status is None else 0.0)
                if status is not None:
                    return status
                if num_tasks(self._settings["max_processes"]) > self._settings["max_processes"]:
                    self.too_many = True
                    break
            return None
        finally:
            end_descendants()
            while self._is_open and self._talk(0.0):  # what it said last
                pass

    def _end_soon(self, *_: object) -> None:
        self._told_to_end = True

    def _reaped(self) -> int | None:
        """Collect who has ended, orphans too; return the program's status if it was among them."""
        found = None
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if ended[0] == self._child:
                    status = os.waitstatus_to_exitcode(ended[1])
                    found = status if status >= 0 else 128 - status
        return found

    def _talk(self, longest_s: float) -> bool:
        """Hand over the tests when asked, and keep what is answered."""
        readers = [self._end, self._line] if self._is_open else [self._end]
        writers = [self._line] if self._unsent and self._is_open else []
        readable, writable, _ = select.select(readers, writers, [], longest_s)
        with contextlib.suppress(ConnectionError):
            if writable:
                self._unsent = self._unsent[self._line.send(self._unsent) :]
            if self._line not in readable:
                return False
            heard = self._line.recv(65536)
            self._is_open = bool(heard)
            if not self.said and heard[:1] == TESTS_PLEASE:
                self._unsent = os.pread(self._settings["tests"], 1 << 30, 0)
            if len(self.said) < _SAID_BYTES:
                self.said += heard
            return True
        self._is_open = False
        return False


def children_of(pid: int) -> list[int]:
    """Return the children of every thread of a process; none if it has ended."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            path = f"/proc/{pid}/task/{thread}/children"
            found += map(int, Path(path).read_bytes().split())
    return found


def num_tasks(enough: int) -> int:
    """Count the processes and threads below this one, no further than is enough to know."""
    count, unseen = 0, children_of(os.getpid())
    while unseen and count <= enough:
        pid = unseen.pop()
        with contextlib.suppress(OSError):
            count += len(os.listdir(f"/proc/{pid}/task"))
        unseen += children_of(pid)
    return count


def end_descendants() -> None:
    """Kill all that descends from this process: stop each, then look for what it has begotten.

    A process that stands still forks no more, so the rounds come to an end.
    """
    while pids := children_of(os.getpid()):
        seen: set[int] = set()
        while found := [pid for pid in pids if pid not in seen]:
            for pid in found:
                _signal(pid, signal.SIGSTOP)
            seen.update(found)
            pids = [child for pid in seen for child in children_of(pid)]
        for pid in seen:
            _signal(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(-1, 0)
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def _signal(pid: int, signum: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signum)


def own_user() -> bool:
    """Take a real user id that nobody has: the kernel does not limit the processes of root.

    Files stay those of the effective user. Returns False where this user may not do that.
    """
    if os.geteuid() != 0:
        return False
    with contextlib.suppress(OSError):
        os.setresuid(_OWN_USERS + os.getpid(), -1, -1)
        return True
    return False


def give_up_powers(libc: Any) -> None:
    """Give up what root has, here and in the name space, for good."""
    power = 0
    while libc.prctl(_FORGET_POWER, power, 0, 0, 0) == 0:
        power += 1
    libc.capset((ctypes.c_uint32 * 2)(_POWERS_VERSION, 0), (ctypes.c_uint32 * 6)())


def _kernel() -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", os.uname().release)[:2])


def become_program(
    settings: dict[str, Any], libc: Any, line: socket.socket, *, fence: "Fence"
) -> int:
    """Run the program in this process, or in process 2 of a name space with this as process 1."""
    for name in ("tests", "report", "above"):
        os.close(settings[name])
    if fence.is_enclosed:
        _load("sandbox_mounts").enclose_processes(libc)
    if not fence.has_user:  # whose effective one it would become in programs that it starts
        libc.prctl(_NO_NEW_POWERS, 1, 0, 0, 0)
    if fence.files == "rules":
        _load("sandbox_landlock").refuse_files(settings, libc)
    give_up_powers(libc)
    libc.prctl(_DIE_WITH_PARENT, signal.SIGKILL, 0, 0, 0)
    if fence.is_enclosed:  # process 1 of a name space is deaf to signals
        child = os.fork()
        if child:
            line.close()
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            os._exit(status if status >= 0 else 128 - status)
        libc.prctl(_DIE_WITH_PARENT, signal.SIGKILL, 0, 0, 0)
    libc.prctl(_DUMPABLE, 1, 0, 0, 0)
    counted = fence.has_user or (fence.is_enclosed and _kernel() >= _COUNTED_BY_NAMESPACE)
    limit(settings, is_counted_alone=counted)
    running = _load("sandbox_program")
    if settings["has_tests"]:
        running.run_tested(settings["program"], line)
    else:
        line.close()
        running.run(settings["program"])
    return 0


class Fence(NamedTuple):
    """What there is between the program and the rest.

    Attributes:
        is_enclosed: whether it is in name spaces of users, processes, the network and IPC.
        files: "own": the file system is read-only, and its own folders lie over what is hidden;
            "rules": it can write and read no other files; "open": it can what its user can.
        has_user: whether it has a real user id of its own.
    """

    is_enclosed: bool
    files: str
    has_user: bool


def put_up_fence(settings: dict[str, Any], libc: Any) -> Fence:
    """Shut all doors that this process and its children can share.

    Raises:
        OSError: if mounts were begun and refused; none of them can be taken back.
    """
    has_user = own_user()
    is_enclosed = libc.unshare(_NEW_USER | _NEW_PROCESSES | _NEW_NETWORK | _NEW_IPC) == 0
    has_mounts = is_enclosed and settings["has_mounts"]
    if has_mounts and _load("sandbox_mounts").enclose_files(settings, libc):
        return Fence(is_enclosed=True, files="own", has_user=has_user)
    if not _load("sandbox_landlock").has_rules(libc):
        return Fence(is_enclosed=is_enclosed, files="open", has_user=has_user)
    if has_user and not is_enclosed:  # rules want "no new privileges": see `become_program`
        os.setresuid(os.geteuid(), -1, -1)
        has_user = False
    return Fence(is_enclosed=is_enclosed, files="rules", has_user=has_user)


def python_places() -> list[str]:
    """Where this Python, its packages and this package are."""
    places = [sys.prefix, sys.exec_prefix, sys.base_prefix, sys.base_exec_prefix]
    binary = os.path.dirname(os.path.realpath(sys.executable))
    return [*places, *sys.path, binary, os.path.dirname(__file__)]


def _load(name: str) -> Any:  # a module beside this one; no folder of ours is on the path
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main(settings: dict[str, Any]) -> int:
    """Guard one program; return its exit status."""
    libc = ctypes.CDLL(None, use_errno=True)
    settings["readable"] = [*settings["readable"], *python_places()]
    settings |= {"devices": _DEVICES, "user": os.geteuid(), "group": os.getegid()}
    settings["above"] = os.open("../..", os.O_PATH)  # as it is outside, to clean up there
    outer = os.path.basename(os.path.dirname(os.getcwd()))
    try:
        fence = put_up_fence(settings, libc)
    except OSError as error:
        sys.stderr.write(f"{error}\n")
        return HALF_ENCLOSED
    if settings["is_required"] and not (fence.is_enclosed and fence.files != "open"):
        return OPEN_FILES if fence.is_enclosed else NO_NAMESPACES
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    libc.prctl(_DUMPABLE, 0, 0, 0, 0)
    libc.prctl(_ADOPT_ORPHANS, 1, 0, 0, 0)
    near, far = socket.socketpair()
    child = os.fork()
    if not child:
        near.close()
        return become_program(settings, libc, far, fence=fence)
    far.close()
    watch = Watch(settings, child, near)
    libc.prctl(_DIE_WITH_PARENT, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != settings["worker"]:
        os.kill(os.getpid(), signal.SIGTERM)
    status = watch.until_end()
    said = watch.said.decode("utf-8", "replace")
    report = {"exit_code": status, "too_many": watch.too_many, "said": said}
    report |= {"is_enclosed": fence.is_enclosed, "files": fence.files}
    os.write(settings["report"], json.dumps(report).encode())
    if os.getppid() != settings["worker"]:  # it was killed, and removes nothing any more
        import shutil  # takes a tenth of the time that a program does

        with contextlib.suppress(OSError, RecursionError):
            shutil.rmtree(outer, dir_fd=settings["above"])
    return 0


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))
