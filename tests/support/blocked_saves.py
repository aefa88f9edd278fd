"""Saves, and reading, that do not come to an end, as in a file system that is gone.

What stands for it is a pipe in the place of a file, of which nobody has the other end: to open it
takes for ever.
"""

import contextlib
import os
from pathlib import Path
from typing import Protocol


class Polled(Protocol):
    """A process, as `subprocess.Popen` is one."""

    def poll(self) -> int | None:
        """Return how it ended, if it has."""
        ...


def block_a_save(checkpoints: Path, process: Polled) -> Path:
    """Put the pipe where a save that is going on has yet to write; return its directory."""
    found = list[Path]()

    def is_put() -> bool:
        for writing in checkpoints.glob(".writing-[0-9]*"):
            # it has got so far already, or is over
            with contextlib.suppress(FileExistsError, FileNotFoundError):
                os.mkfifo(writing / "manifest.json")
                found.append(writing)
                return True
        return False

    while process.poll() is None and not is_put():
        pass
    assert found, "no save could be blocked"
    return found[0]


def block_reading(file: Path) -> Path:
    """Put the pipe in the place of a file at once; return where that lies now, beside it."""
    kept, pipe = file.with_suffix(".kept"), file.with_suffix(".pipe")
    os.link(file, kept)
    os.mkfifo(pipe)
    pipe.rename(file)
    return kept
