"""What Ctrl-C, SIGTERM and SIGHUP do to a run of a world model: the first stops, another kills."""

import contextlib
import signal
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import FrameType

import click

from cosmos_app.stop_signals import Presses, signals_heeded


@contextmanager
def stop_requests(*, says: bool) -> Generator[Callable[[], bool]]:
    """Give what tells whether the run was asked to stop; the signals are its own in the block.

    In a thread other than the main one signals stay as they are. A terminal tells each rank of
    Ctrl-C, and torchrun tells it again: that is the same press.

    Args:
        says: whether this rank tells that it was heard.

    Raises:
        KeyboardInterrupt: from inside, at a later signal.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    presses = Presses()

    def ask(signum: int, frame: FrameType | None) -> None:
        del frame
        pressed = signal.Signals(signum)
        if not presses.is_first(pressed):
            if presses.kills(pressed):
                raise KeyboardInterrupt
        elif says:
            with contextlib.suppress(OSError):  # of a terminal that is gone
                click.echo("stopping after the step in hand; Ctrl-C again kills", err=True)

    before = [(each, signal.signal(each, ask)) for each in signals_heeded()]
    try:
        yield lambda: bool(presses.reason)
    finally:
        for each, handler in before:
            signal.signal(each, handler)
