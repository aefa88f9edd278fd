"""Who holds a run directory: what the process that locked it has left in its lock file."""

import os
import socket
import time
from dataclasses import dataclass
from typing import IO


@dataclass(frozen=True, kw_only=True, slots=True)
class Holder:
    """A live process that holds a run directory, maybe on another machine that shares it.

    Attributes:
        pid: that process; 0 if it has not said yet.
        host: name of its machine or container; empty if it has not said.
        since_s: when it took the directory, seconds since the epoch by the clock of the file
            system; 0 if it has not said.
    """

    pid: int = 0
    host: str = ""
    since_s: float = 0.0

    def __str__(self) -> str:
        """Say it to people, in the time of this machine."""
        if not self.pid:
            return "another process"
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.since_s))
        where = f" on {self.host}" if self.host else ""
        return f"process {self.pid}{where} since {since}"


def note_holder(lock: IO[str]) -> None:
    """Leave in a lock file who has it: this process."""
    lock.truncate(0)
    lock.write(f"{os.getpid()} {socket.gethostname()}\n")
    lock.flush()


def noted_holder(lock: IO[str]) -> Holder:
    """Return who has a lock file that is locked, as far as it says."""
    lock.seek(0)
    pid, host, *_ = [*lock.read().split(), "", ""]
    if not pid.isdecimal():
        return Holder()
    return Holder(pid=int(pid), host=host, since_s=os.fstat(lock.fileno()).st_mtime)
