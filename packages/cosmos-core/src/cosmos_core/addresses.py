"""Addresses of hosts, of IPv4 and IPv6 alike: as text, and where sockets wait for others."""

import socket

_BACKLOG = 128


def in_url(host: str) -> str:
    """Return a host as it stands in a URL or before a port: an address of IPv6 in brackets."""
    return f"[{host}]" if ":" in host else host


def listen_on(host: str, port: int) -> socket.socket:
    """Take an address; it is held from here on.

    Args:
        host: a name, or an address of IPv4 or IPv6.
        port: 0 for any free one.

    Raises:
        OSError: if it cannot be had.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    taken = socket.socket(family, kind, protocol)
    try:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind(address)
        taken.listen(_BACKLOG)
    except BaseException:
        taken.close()
        raise
    return taken
