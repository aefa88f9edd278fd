"""Ctrl-C at ranks that hang: who is waited for is said, and a second one stops them now.

torchrun tells its ranks once, and then waits for their end, whatever comes. ::

    first signal ─► (torchrun tells the ranks) ─► who still runs, every minute
                                             └─ second signal ─► grace ─► SIGKILL
"""

import os
import signal
import sys
import threading
import time
from pathlib import Path

from cosmos_app.process_table import children_of
from cosmos_app.supervisor import signal_session

_SAME_PRESS_S = 1.0
_GRACE_S = 5.0
_LOOK_S = 0.2
_SAY_EVERY_S = 60.0
_LATER = frozenset({signal.SIGINT, signal.SIGTERM})
_FIRST = _LATER | {signal.SIGHUP}  # the kernel and shells repeat that one


def watch_signals(longest_s: float) -> None:
    """Watch the signals that end this process, from its main thread, for as long as it lives.

    Args:
        longest_s: how long ranks are waited for after the first one; by others, it is only said.
    """
    read, write = os.pipe()
    os.set_blocking(write, False)
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    threading.Thread(target=_watch, args=(read, longest_s), name="signals", daemon=True).start()


def ranks_of(pid: int) -> dict[int, str]:
    """Return the children of a process that are ranks and run, by process id, with their names."""
    found: dict[int, str] = {}
    for child in children_of(pid):
        try:
            environment = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
        except OSError:
            continue  # it ended meanwhile
        rank = next((e[5:].decode() for e in environment if e.startswith(b"RANK=")), "")
        if rank:
            found[child] = f"rank {rank} (process {child})"
    return dict(sorted(found.items(), key=lambda item: item[1]))


def _watch(signals: int, longest_s: float) -> None:
    _await_signal(signals, _FIRST)
    first = time.monotonic()
    threading.Thread(target=_tell, args=(longest_s,), name="ranks", daemon=True).start()
    while time.monotonic() - first < _SAME_PRESS_S:
        _await_signal(signals, _LATER)  # one that comes at once is the same press
    _say(f"stopped again: {_names()} are killed in {_GRACE_S:g} s")
    deadline = time.monotonic() + _GRACE_S
    while ranks_of(os.getpid()) and time.monotonic() < deadline:
        time.sleep(_LOOK_S)
    for pid in ranks_of(os.getpid()):
        signal_session(pid, signal.SIGKILL)


def _await_signal(signals: int, awaited: frozenset[int]) -> None:
    while os.read(signals, 1)[0] not in awaited:
        pass


def _tell(longest_s: float) -> None:
    begun = time.monotonic()
    while _names():
        left_s = longest_s - (time.monotonic() - begun)
        _say(f"waiting for {_names()}, {max(0.0, left_s):.0f} s at most; once more stops now")
        time.sleep(_SAY_EVERY_S)


def _names() -> str:
    return ", ".join(ranks_of(os.getpid()).values())


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()
