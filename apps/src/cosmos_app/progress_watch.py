"""The parts of a replica's work, and the end of the process where it stays in one of them.

Whoever hangs, in a device, in a file system that is gone, in a reward, cannot say so; a thread of
its own does.
"""

import faulthandler
import os
import threading
from contextlib import AbstractContextManager
from typing import Self

import click

_LOOKS = 8
_TELL_S = 5.0


class ProgressWatch(AbstractContextManager["ProgressWatch"]):
    """Ends this process if it stays at one part of its work, inside a block.

    Looks are counted, not seconds: a process that was stopped as a whole did not hang.
    """

    def __init__(self, replica: str, stall_s: float) -> None:
        """Get ready; nothing is looked at before the block.

        Args:
            replica: that this process is.
            stall_s: longest that a part may take.
        """
        self._replica = replica
        self._stall_s = stall_s
        self._part = ""
        self._looks = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()

    def at(self, part: str) -> None:
        """Note that a part begins, and that the one before is over."""
        self._part, self._looks = part, 0

    def rest(self) -> None:
        """Note that what follows may take as long as it likes, such as waiting for work."""
        self.at("")

    def look(self) -> str:
        """Look once; return the part that takes too long, or nothing."""
        self._looks += 1
        return self._part if self._looks > _LOOKS else ""

    def _watch(self) -> None:
        while not self._over.wait(min(self._stall_s / _LOOKS, threading.TIMEOUT_MAX)):
            if part := self.look():
                said = f"{self._replica}: {part} took more than {self._stall_s:g} s"
                telling = threading.Thread(target=_tell, args=(said,), daemon=True)
                telling.start()
                telling.join(_TELL_S)  # the log may be in the file system that is gone
                os._exit(1)  # the main thread cannot be asked to end


def _tell(said: str) -> None:
    """Say it, below the stacks of all threads."""
    with os.fdopen(os.memfd_create("stacks"), "r+b") as stacks:
        # it keeps the interpreter's lock while it writes: not to a log that may block
        faulthandler.dump_traceback(stacks, all_threads=True)
        stacks.seek(0)
        click.echo(stacks.read().decode(errors="replace"), err=True, nl=False)
    click.echo(f"{said}, so it ends; its threads are listed above", err=True)
