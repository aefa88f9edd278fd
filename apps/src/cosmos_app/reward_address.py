"""Where a reward service listens, and the token that it wants of its clients."""

import os
import secrets
import socket
from pathlib import Path

from cosmos_app.errors import DashboardAddressError, DataError
from cosmos_core.addresses import listen_on

_TOKEN_BYTES = 24
_LEAST_TOKEN = 16
TOKEN_NAMES = ("REMOTE_REWARD_TOKEN", "WFM_REWARD_TOKEN")


def parse_address(listen: str) -> tuple[str, int]:
    """Return host and port of ``HOST:PORT``.

    Raises:
        DataError: if it is none.
    """
    host, _, port = listen.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise DataError(f"--listen {listen}: want HOST:PORT, such as 127.0.0.1:8000")
    return host.strip("[]"), int(port)


def service_token(token_file: Path | None) -> tuple[str, bool]:
    """Return the token, from a file, the environment or anew, and whether it is a new one.

    Raises:
        DataError: if the file cannot be read, or the token is too short to be a secret.
    """
    found = next((os.environ[name] for name in TOKEN_NAMES if os.environ.get(name)), "")
    if token_file is not None:
        try:
            found = token_file.read_text(encoding="utf-8").partition("\n")[0].strip()
        except OSError as error:
            raise DataError(f"{token_file} cannot be read: {error}") from error
    elif not found:
        return secrets.token_urlsafe(_TOKEN_BYTES), True
    if len(found) < _LEAST_TOKEN or not found.isascii() or not found.isprintable():
        raise DataError(f"a token has to be {_LEAST_TOKEN} or more printable ASCII characters")
    return found, False


def take_address(host: str, port: int) -> socket.socket:
    """Take the address of a reward service; it is held from here on.

    Raises:
        DashboardAddressError: if it cannot be had.
    """
    try:
        return listen_on(host, port)
    except OSError as error:
        raise DashboardAddressError(
            f"reward-service: cannot listen on {host} port {port} "
            f"({error.strerror or error}); choose another with --listen, or port 0 for any free one"
        ) from error
