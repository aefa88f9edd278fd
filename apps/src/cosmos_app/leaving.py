"""The end of a process of ours: what was registered for it runs, and nothing is taken apart.

Python would free every module that was imported, half a second where torch is one of them.
Extensions made with nanobind, as triton is, then print thirty lines about what they "leaked":
objects that the collector was told to leave alone (`kept_modules`).
"""

import atexit
import contextlib
import os
import sys
from types import TracebackType
from typing import Self


def exit_code(error: BaseException | None) -> int:
    """Return what Python's own end of a process would, for what its main program ended with."""
    match error:
        case None:
            return 0
        case SystemExit(code=None):
            return 0
        case SystemExit(code=int(code)):
            return code & 0xFF
        case KeyboardInterrupt():
            return 130
        case _:
            return 1


class Leaving:
    """A context around all that a process does; made before anything is registered for its end.

    What is registered later is called before, as `atexit` has it, and threads are waited for before
    that.
    """

    def __init__(self) -> None:
        """Nothing has ended yet."""
        self._code = 1
        atexit.register(self._leave)

    def __enter__(self) -> Self:
        """Do nothing."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Note what the process is to say to who started it."""
        self._code = exit_code(error)

    def _leave(self) -> None:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(self._code)
