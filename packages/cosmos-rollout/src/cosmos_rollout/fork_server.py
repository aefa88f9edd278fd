"""The process that workers are forked from, one for each process: ended where it is suspended.

Python asks it for a worker, and for how one has ended, without a deadline.
"""

import contextlib
import os
import signal
import time
from multiprocessing import forkserver
from pathlib import Path

_ENDED_S = 5.0
_LOOK_S = 0.01


def end_if_suspended() -> None:
    """Kill this process's fork server if it was stopped by a signal; another one follows it.

    What it has started counts as dead then. Waits until it has ended: Python would go on asking.
    """
    pid: int | None = getattr(forkserver._forkserver, "_forkserver_pid", None)  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue] nobody else says
    if pid is None or _state_of(pid) != "T":
        return
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + _ENDED_S
    while _state_of(pid) not in {"", "Z"} and time.monotonic() < deadline:
        time.sleep(_LOOK_S)


def _state_of(pid: int) -> str:
    """Return a letter, see proc_pid_stat(5); nothing of a process that is not there."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""
