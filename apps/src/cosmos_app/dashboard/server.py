"""Serving the dashboard of one run: its port, its token, where both are written down, its loop."""

import asyncio
import contextlib
import secrets
import socket
import time
from collections.abc import Callable
from typing import Protocol
from urllib.parse import quote

from starlette.types import ASGIApp

from cosmos_app.dashboard.address import DashboardAddress, read_address_file
from cosmos_app.errors import DashboardAddressError, DataError
from cosmos_app.http_serving import http_server
from cosmos_app.listening import http_url
from cosmos_core.addresses import listen_on
from cosmos_core.rundir import RunDirectory
from cosmos_core.serving_config import DashboardConfig

_LET_GO_S = 5.0
_RETRY_S = 0.2
_TOKEN_BYTES = 24


def bind(config: DashboardConfig, *, patience_s: float = 0.0) -> socket.socket:
    """Take the configured address; it is held from here on.

    Args:
        config: the address.
        patience_s: how long to wait for a port that somebody else still has.

    Raises:
        DashboardAddressError: saying which address it is and what to do.
    """
    deadline = time.monotonic() + patience_s
    while True:
        try:
            return listen_on(config.host, config.port)
        except OSError as error:
            if time.monotonic() + _RETRY_S > deadline:
                raise DashboardAddressError(
                    f"dashboard: cannot listen on {config.host} port {config.port} "
                    f"({error.strerror or error}); choose another port with "
                    "dashboard.port=NUMBER, any free one with dashboard.port=0, or do without "
                    "with dashboard.enabled=false"
                ) from error
        time.sleep(_RETRY_S)


def check_address(config: DashboardConfig) -> None:
    """Check, before a run starts, that its dashboard will have its port and its token.

    Raises:
        DashboardAddressError: if the port cannot be had.
        DataError: if there is no token in the file that the recipe names.
    """
    if config.enabled:
        _given_token(config)
        bind(config).close()


def _given_token(config: DashboardConfig) -> str:
    if config.token_file is None:
        return ""
    try:
        token = config.token_file.read_text().partition("\n")[0].strip()
    except OSError as error:
        raise DataError(f"dashboard.token_file: cannot be read: {error}") from error
    if len(token) < 16 or not token.isascii() or not token.isprintable() or set(token) & set(' ";'):
        raise DataError(
            f"dashboard.token_file: the first line of {config.token_file} has to be a token of 16 "
            "or more printable ASCII characters without spaces, quotes or semicolons"
        )
    return token


def open_address(
    config: DashboardConfig, run: RunDirectory
) -> tuple[socket.socket, DashboardAddress]:
    """Take an address for a run's dashboard, the one it had before where that is free.

    Raises:
        DashboardAddressError: if the configured port cannot be had.
        DataError: if there is no token in the file that the recipe names.
    """
    before = read_address_file(run)
    token = _given_token(config) or (before.token if before else "")
    token = token or secrets.token_urlsafe(_TOKEN_BYTES)
    taken = _take_again(config, before) or bind(config, patience_s=_LET_GO_S)
    port = int(taken.getsockname()[1])
    return taken, DashboardAddress(url=url_of(taken, token), port=port, token=token)


def url_of(taken: socket.socket, token: str) -> str:
    """Return what a browser opens for a listening socket."""
    return f"{http_url(taken)}/?token={quote(token, safe='')}"


def _take_again(config: DashboardConfig, before: DashboardAddress | None) -> socket.socket | None:
    if config.port or before is None:
        return None
    with contextlib.suppress(DashboardAddressError):
        return bind(DashboardConfig(host=config.host, port=before.port), patience_s=_LET_GO_S / 2)
    return None


class Feed(Protocol):
    """What follows a run of some kind; its application shows what it knows."""

    async def look(self) -> bool:
        """Take in what is new, or a part of it; tell whether there is more."""
        ...

    async def follow(self) -> None:
        """Look again and again, until cancelled."""
        ...


async def serve(
    feed: Feed,
    app: ASGIApp,
    taken: socket.socket,
    *,
    started: Callable[[], None] = lambda: None,
) -> None:
    """Serve a run's dashboard until cancelled or told to end by a signal.

    Args:
        feed: what is known of the run; it looks once before anybody is answered.
        app: shows that, to whoever has the token.
        taken: a listening socket; it is closed in the end.
        started: called once, when what was recorded so far is read.
    """
    await feed.look()
    server = http_server(app, grace_s=1)
    following = asyncio.create_task(feed.follow())
    started()
    try:
        await server.serve(sockets=[taken])
    finally:
        following.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await following
        taken.close()
