"""Which of the two a server that does not answer speaks: TLS or plain Redis."""

import contextlib
import socket
import ssl
from pathlib import Path
from urllib.parse import parse_qsl, urlsplit

_ANSWER_S = 2.0
_PORT = 6379
_FILES = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")


def tls_advice(url: str, error: str) -> str:
    """Say what to do if a server is spoken to in TLS and speaks none, or the other way round.

    Also where one side does not trust the other. Blocks for a few seconds; empty if the server is
    not there, or it is none of these.

    Args:
        url: one that could be connected to as a server of Redis, and nobody answered.
        error: what came of it.
    """
    if "CERTIFICATE_VERIFY_FAILED" in error:
        return (
            "; its certificate is of nobody who is trusted here, or for another name: add "
            "?ssl_ca_certs=FILE to the URL, the certificate of who signed it"
        )
    scheme, host, port = _place_of(url)
    if scheme == "rediss" and _speaks_plain(host, port):
        return "; it speaks no TLS there: write redis:// for rediss://, or give its port for TLS"
    if scheme == "redis" and _speaks_tls(host, port):
        return "; it speaks TLS there: write rediss:// for redis://"
    if scheme == "rediss" and "ssl_certfile" not in url and _wants_certificate(host, port):
        return "; it wants a certificate: add ?ssl_certfile=FILE&ssl_keyfile=FILE to the URL"
    return ""


def absent_files(url: str) -> str:
    """Say which file that a URL names is not there; empty if all of them are."""
    named = parse_qsl(urlsplit(url).query)
    absent = [f"{key}={file}" for key, file in named if key in _FILES and not Path(file).is_file()]
    return f"there is no file {', '.join(absent)}" if absent else ""


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
    with contextlib.suppress(OSError), _connection(host, port) as connection:
        try:
            _trusting().wrap_socket(connection, server_hostname=host).close()
        except ssl.SSLError as error:
            return "ALERT" in str(error.reason)  # as of a server that wants our certificate
        return True
    return False


def _wants_certificate(host: str, port: int) -> bool:
    """Whether a server that speaks TLS hangs up on who shows none."""
    with (
        contextlib.suppress(OSError),
        _connection(host, port) as connection,
        _trusting().wrap_socket(connection, server_hostname=host) as spoken,
    ):
        spoken.settimeout(_ANSWER_S)
        try:
            spoken.sendall(b"PING\r\n")
            return spoken.recv(1) not in (b"+", b"-")
        except (ssl.SSLError, ConnectionError):
            return True
    return False


def _trusting() -> ssl.SSLContext:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # nothing is told to it
    return context


def _connection(host: str, port: int) -> socket.socket:
    return socket.create_connection((host, port), timeout=_ANSWER_S)
