"""What Ctrl-C and SIGTERM do to a run of a world model: the first stops it, another kills it."""

import signal
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import FrameType

import click

_SAME_S = 1.0
"""A terminal tells each rank of Ctrl-C, and torchrun tells it again."""


@contextmanager
def stop_requests(*, says: bool) -> Generator[Callable[[], bool]]:
    """Give what tells whether the run was asked to stop; the signals are its own in the block.

    In a thread other than the main one signals stay as they are.

    Args:
        says: whether this rank tells that it was heard.

    Raises:
        KeyboardInterrupt: from inside, at a later signal.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    first: list[float] = []

    def ask(signum: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if first and now - first[0] > _SAME_S:
            raise KeyboardInterrupt
        if not first:
            first.append(now)
            if says:
                click.echo("stopping after the step in hand; Ctrl-C again kills", err=True)

    before = [(each, signal.signal(each, ask)) for each in (signal.SIGINT, signal.SIGTERM)]
    try:
        yield lambda: bool(first)
    finally:
        for each, handler in before:
            signal.signal(each, handler)
