"""The end of a process of ours: what was registered for it runs, and nothing is taken apart.

Python would free every module that was imported, half a second where torch is one of them.
Extensions made with nanobind, as triton is, then print thirty lines about what they "leaked":
objects that the collector was told to leave alone (`kept_modules`).
"""

import atexit
import contextlib
import os
import sys
from collections.abc import Generator


def exit_code(error: BaseException) -> int:
    """Return what Python's own end of a process would, for what its main program ended with."""
    match error:
        case SystemExit(code=None):
            return 0
        case SystemExit(code=int(code)):
            return code & 0xFF
        case KeyboardInterrupt():
            return 130
        case _:
            return 1


@contextlib.contextmanager
def leaving() -> Generator[None]:
    """Be around all that a process does; entered before anything is registered for its end.

    What is registered later is called before, as `atexit` has it, and threads are waited for before
    that.
    """
    code = 1

    def leave() -> None:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError, AttributeError):  # none, if it was closed
                stream.flush()
        os._exit(code)

    atexit.register(leave)
    try:
        yield
    except BaseException as error:
        code = exit_code(error)
        raise
    code = 0
