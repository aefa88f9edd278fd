"""What a replica says while it is busy: that it is there, several times in each lease."""

import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from multiprocessing.connection import Connection
from typing import Self

PULSE = b"here"
_PER_LEASE = 5


class Pulse(AbstractContextManager["Pulse"]):
    """Speaks over connections for the length of a block, from a thread of its own.

    Whatever else is sent over them goes through ``send``: messages must not mix.
    """

    def __init__(self, links: Sequence[Connection], lease_s: float) -> None:
        """Get ready.

        Args:
            links: to the ranks of a run.
            lease_s: how long these wait for a word.
        """
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
        while not self._over.wait(self._pause_s):
            for link in self._links:
                with suppress(OSError):  # who reads it sees that it has ended
                    self.send(link, PULSE)
