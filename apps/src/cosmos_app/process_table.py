"""The processes of this machine, as /proc tells of them."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_PROC = Path("/proc")


class ProcessEntry(NamedTuple):
    """One process.

    Attributes:
        pid: its process id.
        state: a letter, see proc_pid_stat(5): "T" is stopped by a signal, "Z" has ended.
        parent: who started it, or took it over.
        session: whose it is part of.
    """

    pid: int
    state: str
    parent: int
    session: int


def processes() -> Iterator[ProcessEntry]:
    """Give all that there are; none where there is no ``/proc``."""
    for stat in _PROC.glob("[0-9]*/stat"):
        try:
            text = stat.read_text()
        except OSError:
            continue  # it has ended
        # behind the command in brackets
        state, parent, _, session, *_ = text.rpartition(")")[2].split()
        yield ProcessEntry(int(stat.parent.name), state, int(parent), int(session))


def children_of(pid: int) -> list[int]:
    """Return the children of a process that run."""
    return [each.pid for each in processes() if each.parent == pid and each.state != "Z"]
