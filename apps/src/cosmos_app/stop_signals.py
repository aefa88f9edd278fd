"""Signals that end a run: Ctrl-C, SIGTERM of a cluster, SIGHUP of a terminal that is gone."""

import contextlib
import os
import signal
import stat
import time
from pathlib import Path
from types import FrameType

INTERRUPTED = 130
"""The exit code of what a Ctrl-C has ended."""

_SAME_PRESS_S = 1.0
_REASONS = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM", signal.SIGHUP: "SIGHUP"}
_OUTPUTS = (1, 2)


def signals_heeded() -> tuple[signal.Signals, ...]:
    """Return the signals that end a run; SIGHUP only where it would, so not under nohup."""
    is_ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    always = (signal.SIGINT, signal.SIGTERM)
    return always if is_ignored else (*always, signal.SIGHUP)


def leave_on_interrupt() -> None:
    """Have a Ctrl-C end this process at once and without a word, as long as it only imports.

    An error raised in the middle of an import may be taken for one of the module's. Nothing is
    changed where Ctrl-C is ignored, as it is in the background.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _leave)


def interrupt_again() -> None:
    """Have a Ctrl-C raise ``KeyboardInterrupt``, as it does by default."""
    if signal.getsignal(signal.SIGINT) is _leave:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _leave(_: int, __: FrameType | None) -> None:
    os._exit(INTERRUPTED)


class Presses:
    """Tells the first signal that ends a run from a later one, which kills it.

    One may come several times: Slurm tells each process, a shell passes SIGHUP on and the kernel
    repeats it. What comes within a second is the same press, and SIGHUP is never a later one.

    Attributes:
        reason: which signal came first; empty before.
    """

    def __init__(self) -> None:
        """None has come."""
        self.reason = ""
        self._first_s = 0.0

    def is_first(self, signum: signal.Signals) -> bool:
        """Take a signal in; tell whether it is the first."""
        if self.reason:
            return False
        self.reason, self._first_s = _REASONS[signum], time.monotonic()
        return True

    def kills(self, signum: signal.Signals) -> bool:
        """Whether a signal after the first one ends the run at once."""
        return signum != signal.SIGHUP and time.monotonic() - self._first_s > _SAME_PRESS_S


def leave_terminal(log: Path) -> None:
    """Have what is printed go to a file from here on, where it went to a terminal or a pipe.

    Both are gone after SIGHUP, and whoever prints to them gets an error.
    """
    with contextlib.suppress(OSError):
        descriptor = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        for output in _OUTPUTS:
            if not stat.S_ISREG(os.fstat(output).st_mode):
                os.dup2(descriptor, output)
        os.close(descriptor)
