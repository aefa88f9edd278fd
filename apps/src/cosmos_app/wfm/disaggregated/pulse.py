"""What a replica says while it is busy: that it is there, several times in each lease.

One that a run has started itself says besides which it is: ``here replica0 4711``.
"""

import os
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from multiprocessing.connection import Connection
from typing import NamedTuple, Self

_PULSE = b"here"
_PER_LEASE = 5


class StartedReplica(NamedTuple):
    """A replica that the run has started: the name of its child, and its process id."""

    name: str
    pid: int


class Pulse(AbstractContextManager["Pulse"]):
    """Speaks over connections for the length of a block, from a thread of its own.

    Whatever else is sent over them goes through ``send``: messages must not mix.
    """

    def __init__(self, links: Sequence[Connection], lease_s: float, *, child: str = "") -> None:
        """Get ready.

        Args:
            links: to the ranks of a run.
            lease_s: how long these wait for a word.
            child: the name that this process has among those that the run has started, if it has.
        """
        self._word = _PULSE + (f" {child} {os.getpid()}".encode() if child else b"")
        self._links = {link: threading.Lock() for link in links}
        self._pause_s = lease_s / _PER_LEASE
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._speak, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop speaking; it does not wait for a word that the network holds up."""
        self._over.set()

    def send(self, link: Connection, data: bytes) -> None:
        """Send a message whole.

        Raises:
            OSError: if the run has hung up.
        """
        with self._links[link]:
            link.send_bytes(data)

    def _speak(self) -> None:
        while True:
            for link in self._links:
                with suppress(OSError):  # who reads it sees that it has ended
                    self.send(link, self._word)
            if self._over.wait(self._pause_s):
                return


def is_pulse(data: bytes) -> bool:
    """Return whether a message of a replica says that it is there, and no more."""
    return data.startswith(_PULSE)


def started_replica(data: bytes) -> StartedReplica | None:
    """Return which replica speaks, if it is a pulse of one that the run has started."""
    match data.decode("ascii", errors="replace").split(" ") if is_pulse(data) else []:
        case [_, name, pid] if pid.isdecimal():
            return StartedReplica(name, int(pid))
        case _:
            return None
