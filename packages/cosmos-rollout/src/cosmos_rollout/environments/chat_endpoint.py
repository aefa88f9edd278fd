"""OpenAI's chat completions over HTTP, for programs of this host that drive conversations.

A program says by a header which conversation it is of; who opened that answers. Nothing listens
outside this host.
"""

import json
from collections.abc import Awaitable, Callable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from cosmos_rollout.errors import EpisodeError

if TYPE_CHECKING:
    from aiohttp import web

SESSION_HEADER = "X-Session-ID"
"""Names the conversation that a request is of."""

_MOST_BYTES = 1 << 30

Answer = Callable[[Mapping[str, Any]], Awaitable[dict[str, Any]]]
"""From a request's body to a chat completion; `EpisodeError` refuses it."""


class ChatEndpoint:
    """A server, up inside ``async with``.

    Requests for a stream are answered by one of two events. A refused request has status 400, after
    which no client asks again.
    """

    def __init__(self) -> None:
        self._answers: dict[str, Answer] = {}
        self._runner: web.AppRunner | None = None
        self._port = 0

    @property
    def url(self) -> str:
        """Base of all addresses, up to and with ``/v1``."""
        return f"http://127.0.0.1:{self._port}/v1"

    def join(self, session: str, answer: Answer) -> None:
        """Have the requests of a session answered."""
        self._answers[session] = answer

    def leave(self, session: str) -> None:
        """Refuse the requests of a session from now on."""
        self._answers.pop(session, None)

    async def __aenter__(self) -> Self:
        """Listen on a free port."""
        from aiohttp import web

        app = web.Application(client_max_size=_MOST_BYTES)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/chat/completions", self._complete)
        app.router.add_route("*", "/{path:.*}", self._refuse)
        self._runner = web.AppRunner(
            app, access_log=None, handler_cancellation=True, shutdown_timeout=1.0
        )
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self._port = self._runner.addresses[0][1]
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Stop listening."""
        if self._runner is not None:
            await self._runner.cleanup()

    async def _complete(self, request: "web.Request") -> "web.Response":
        from aiohttp import web

        answer = self._answers.get(request.headers.get(SESSION_HEADER, ""))
        if answer is None:
            return _refused("no conversation of that name is open")
        try:
            body = await request.json()
            completion = await answer(body)
        except (EpisodeError, ValueError) as error:
            return _refused(str(error))
        if not body.get("stream"):
            return web.json_response(completion)
        return web.Response(body=_events(completion), content_type="text/event-stream")

    async def _models(self, request: "web.Request") -> "web.Response":
        """Say that there is a model, and not how long its context is: none shall be shortened."""
        from aiohttp import web

        del request
        return web.json_response({"object": "list", "data": [{"id": "cosmos", "object": "model"}]})

    async def _refuse(self, request: "web.Request") -> "web.Response":
        return _refused(f"only chat completions can be recorded, not {request.path}")


def _refused(words: str) -> "web.Response":
    from aiohttp import web

    error = {"message": words, "type": "invalid_request_error", "code": None}
    return web.json_response({"error": error}, status=400)


def _events(completion: Mapping[str, Any]) -> bytes:
    """Return a completion as the events of a stream."""
    (choice,) = completion["choices"]
    delta = dict(choice["message"])
    if "tool_calls" in delta:
        delta["tool_calls"] = [
            {"index": index, **call} for index, call in enumerate(delta["tool_calls"])
        ]
    said = {"index": choice["index"], "delta": delta, "finish_reason": choice["finish_reason"]}
    chunk = {**completion, "object": "chat.completion.chunk", "choices": [said]}
    return f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n".encode()
