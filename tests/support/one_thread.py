"""One thread of another process, stopped while its others go on: what a hang in a kernel is like.

It takes ptrace, which Linux grants over one's own children; `can_stop_threads` says whether here.
"""

import contextlib
import ctypes
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

_SEIZE, _INTERRUPT, _DETACH = 0x4206, 0x4207, 17  # of <linux/ptrace.h>
_OF_THREADS = 0x40000000  # __WALL of waitpid


def can_stop_threads() -> bool:
    """Whether this process may trace one that it has started."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        try:
            with stopped(child.pid):
                return True
        except OSError:
            return False
        finally:
            child.kill()


def busiest_thread(pid: int) -> int:
    """Return the thread of a process, other than its first, that has computed for longest."""

    def ticks(task: Path) -> int:
        fields = (task / "stat").read_text().rpartition(")")[2].split()
        return int(fields[11]) + int(fields[12])

    tasks = [task for task in Path(f"/proc/{pid}/task").iterdir() if int(task.name) != pid]
    return int(max(tasks, key=ticks).name)


def is_computing(pid: int, thread: int) -> bool:
    """Whether a thread runs, and goes on running for some milliseconds."""
    for _ in range(4):
        stat = Path(f"/proc/{pid}/task/{thread}/stat").read_text()
        if stat.rpartition(")")[2].split()[0] != "R":
            return False
        time.sleep(0.001)
    return True


@contextlib.contextmanager
def stopped(thread: int) -> Iterator[None]:
    """Stop a thread inside the block; if its process is killed there, it has ended only after it.

    Raises:
        OSError: if that is not granted.
    """
    _trace(_SEIZE, thread)
    try:
        _trace(_INTERRUPT, thread)
        os.waitpid(thread, _OF_THREADS)
        yield
    finally:
        try:
            _trace(_DETACH, thread)
        except OSError:
            os.waitpid(thread, _OF_THREADS)  # killed: its parent is told when this is done


def _trace(request: int, thread: int) -> None:
    ptrace = ctypes.CDLL(None, use_errno=True).ptrace
    ptrace.argtypes = [ctypes.c_long] * 4
    ptrace.restype = ctypes.c_long
    if ptrace(request, thread, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "ptrace")
