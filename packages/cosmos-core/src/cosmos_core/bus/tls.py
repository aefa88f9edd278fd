"""Which of the two a server that does not answer speaks: TLS or plain Redis."""

import contextlib
import socket
import ssl
from urllib.parse import urlsplit

_ANSWER_S = 2.0
_PORT = 6379


def tls_advice(url: str) -> str:
    """Say what to do if a server is spoken to in TLS and speaks none, or the other way round.

    Blocks for a few seconds; empty if the server is not there, or it is not that.

    Args:
        url: one that could be connected to as a server of Redis, and nobody answered.
    """
    scheme, host, port = _place_of(url)
    if scheme == "rediss" and _speaks_plain(host, port):
        return "; it speaks no TLS there: write redis:// for rediss://, or give its port for TLS"
    if scheme == "redis" and _speaks_tls(host, port):
        return "; it speaks TLS there: write rediss:// for redis://"
    return ""


def _place_of(url: str) -> tuple[str, str, int]:
    parts = urlsplit(url)
    return parts.scheme, parts.hostname or "localhost", parts.port or _PORT


def _speaks_plain(host: str, port: int) -> bool:
    with contextlib.suppress(OSError), _connection(host, port) as connection:
        connection.settimeout(_ANSWER_S)
        connection.sendall(b"PING\r\n")
        return connection.recv(1) in (b"+", b"-")
    return False


def _speaks_tls(host: str, port: int) -> bool:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # nothing is told to it
    with contextlib.suppress(OSError), _connection(host, port) as connection:
        try:
            context.wrap_socket(connection, server_hostname=host).close()
        except ssl.SSLError as error:
            return "ALERT" in str(error.reason)  # as of a server that wants our certificate
        return True
    return False


def _connection(host: str, port: int) -> socket.socket:
    return socket.create_connection((host, port), timeout=_ANSWER_S)
