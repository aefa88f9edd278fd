"""Other processes of this machine, as /proc tells of them."""

import asyncio
import contextlib
import os
import sys
from pathlib import Path

import pytest


def _stat(pid: int) -> list[str]:
    """Return what stands behind a process's name: its state, its parent and more."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def is_alive(pid: int) -> bool:
    """Whether a process is there and has not ended."""
    try:
        return _stat(pid)[0] != "Z"
    except OSError:
        return False


async def ends_soon(*pids: int) -> None:
    """Wait until none of some processes is there."""
    for _ in range(3000):
        if not any(is_alive(pid) for pid in pids):
            return
        await asyncio.sleep(0.01)
    pytest.fail(f"of {pids} some are still there")


def importing_from(folder: Path) -> dict[str, str]:
    """Return the environment of who imports modules of a folder beside those of this process."""
    return {"PYTHONPATH": os.pathsep.join([str(folder), *filter(None, sys.path)])}


def is_stopped(pid: int) -> bool:
    """Whether a process is suspended by a signal."""
    return _stat(pid)[0] == "T"


def parent_of(pid: int) -> int:
    """Return who started a process, or took it over."""
    return int(_stat(pid)[1])


def children_of(pid: int) -> list[int]:
    """Return those that a process of one thread has started."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def title_of(pid: int) -> str:
    """Return a process's command line, or the title that it has given itself."""
    line = Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0")
    return line.replace(b"\0", b" ").decode(errors="replace")


def image_of(pid: int) -> str:
    """Return where the heap of a process is: elsewhere after a start, the same after a fork."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return next(line.partition("-")[0] for line in lines if line.endswith("[heap]"))


def descendants(leader: int) -> set[int]:
    """Return what a process has started, and what that has, as far as it has not ended."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            parents[int(entry.name)] = parent_of(int(entry.name))
    found = [leader]
    for pid in found:
        found.extend(child for child, parent in parents.items() if parent == pid)
    return set(found[1:])


def naming(*words: str) -> list[int]:
    """Return the processes with all of these words in their command line or title."""
    found: list[int] = []
    for entry in Path("/proc").glob("[0-9]*"):
        pid = int(entry.name)
        try:
            line = title_of(pid).split()
        except OSError:
            continue
        if all(word in line for word in words):
            found.append(pid)
    return found
