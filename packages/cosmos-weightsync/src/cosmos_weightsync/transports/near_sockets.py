"""Connections whose two ends are on one host, which nothing needs to pace.

What many systems send streams by (BBR) waits between packets, by the clock, so that networks do not
queue. Where there is no network that costs a third of the processors' time and spares nobody
anything. ``reno`` does not wait, and every system lets every process choose it.
"""

import contextlib
import os
import socket
from collections.abc import Generator

__all__ = ["unpace", "unpaced_meanwhile"]

_FAMILIES = {socket.AF_INET, socket.AF_INET6}
_OPEN = "/proc/self/fd"


def unpace(connection: socket.socket) -> None:
    """Have a TCP connection that stays on this host go as fast as it can; leave others alone."""
    option = getattr(socket, "TCP_CONGESTION", None)
    if option is None or connection.family not in _FAMILIES:
        return
    with contextlib.suppress(OSError):  # It is over, or this system has no such thing.
        if connection.getsockname()[0] == connection.getpeername()[0]:
            connection.setsockopt(socket.IPPROTO_TCP, option, b"reno")


@contextlib.contextmanager
def unpaced_meanwhile() -> Generator[None]:
    """The same for connections that a library makes meanwhile and shows to nobody.

    What other threads connect in that time, to this host, is not told apart.
    """
    before = _sockets()
    yield
    for descriptor, name in _sockets().items():
        if before.get(descriptor) == name:
            continue
        with contextlib.suppress(OSError):  # Closed since.
            duplicate = os.dup(descriptor)
            try:
                found = socket.socket(fileno=duplicate)
            except OSError:  # The number is another file's by now.
                os.close(duplicate)
            else:
                with found:
                    unpace(found)


def _sockets() -> dict[int, str]:
    """The open sockets of this process, with the system's names for them."""
    found: dict[int, str] = {}
    with contextlib.suppress(OSError):
        for descriptor in os.listdir(_OPEN):
            with contextlib.suppress(OSError):
                name = os.readlink(f"{_OPEN}/{descriptor}")
                if name.startswith("socket:"):
                    found[int(descriptor)] = name
    return found
