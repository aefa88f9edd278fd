"""How our HTTP APIs are served: strangers cannot hold connections, and no token gets into a log.

A connection is idle while it has not said the whole head of a request, and after the answer to the
one before it. After ten seconds of that it is closed, and where there are too many, the one that is
idle for longest: descriptors are left for whoever has the token, however many somebody opens.
"""

import asyncio
import socket
from collections.abc import Awaitable, Callable
from typing import Any, ClassVar, cast

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

_BACKLOG = 64  # asyncio takes so many connections in before it looks at any of them


async def _nothing() -> None:
    """Do nothing."""


def http_server(
    app: ASGIApp, *, grace_s: int, before_end: Callable[[], Awaitable[None]] = _nothing
) -> uvicorn.Server:
    """Return what serves an application; its sockets are given to ``serve``.

    Args:
        app: lets nobody in without a token.
        grace_s: how long requests in hand may take once it is to end.
        before_end: called once it is to end, by a signal as well, while those are still in hand.
    """
    # No access log: the address of a browser's first request holds the token.
    config = uvicorn.Config(
        app,
        http=ImpatientHttp,
        log_level="warning",
        access_log=False,
        backlog=_BACKLOG,
        timeout_graceful_shutdown=grace_s,
        server_header=False,
    )
    return _Server(config, before_end)


class _Server(uvicorn.Server):
    """One that says when it is about to end."""

    def __init__(self, config: uvicorn.Config, before_end: Callable[[], Awaitable[None]]) -> None:
        super().__init__(config)
        self._before_end = before_end

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Have others get ready, and end."""
        await self._before_end()
        await super().shutdown(sockets)


class ImpatientHttp(H11Protocol):
    """One connection over HTTP/1.1, which is not idle for long.

    Attributes:
        most_idle_s: how long it may be.
        most_idle: how many may be, before the one that is for longest goes.
    """

    most_idle_s: ClassVar[float] = 10.0
    most_idle: ClassVar[int] = 256

    # Any: uvicorn makes it, with what is between the two of them
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Nobody is connected yet."""
        super().__init__(*args, **kwargs)
        self._idle_since_s = 0.0
        self._end: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Wait for the first request; another connection may have to go for this one."""
        super().connection_made(cast("asyncio.Transport", transport))
        self._begin_to_idle()
        idle = [one for one in cast("set[ImpatientHttp]", self.connections) if one.is_idle]
        if len(idle) > self.most_idle:
            min(idle, key=lambda one: one._idle_since_s).hang_up()

    def on_response_complete(self) -> None:
        """Wait for the next request."""
        super().on_response_complete()
        self._begin_to_idle()

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait for nothing any more."""
        super().connection_lost(exc)
        if self._end is not None:
            self._end.cancel()

    @property
    def is_idle(self) -> bool:
        """Whether no request is in hand."""
        # what uvicorn says of the type of a cycle leaves out that there is none at first
        cycle = cast("Any", self.cycle)
        return cycle is None or bool(cycle.response_complete)

    def hang_up(self) -> None:
        """Close the connection, if it is idle."""
        if self.is_idle:
            self.transport.close()

    def _begin_to_idle(self) -> None:
        if self._end is not None:
            self._end.cancel()
        self._idle_since_s = self.loop.time()
        self._end = self.loop.call_later(self.most_idle_s, self.hang_up)
