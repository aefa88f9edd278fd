"""Who may see a run: whoever has its token, as a Bearer header or, for a browser, as a cookie.

A browser opens ``/?token=...`` once: the token moves into a cookie of its own, that scripts cannot
read and other sites cannot send, and out of the address.
"""

import hashlib
import logging
import secrets
import time
from collections.abc import Iterator
from urllib.parse import parse_qs

from starlette.types import ASGIApp, Message, Receive, Scope, Send

_LOG = logging.getLogger(__name__)
_LOG_EVERY_S = 60.0
_REFUSAL = (
    "Wrong or missing token: open the address that cosmos-app printed, or send the header "
    "'Authorization: Bearer TOKEN'.\n"
)
_HEADERS = (
    (b"cache-control", b"no-store"),
    (b"content-security-policy", b"default-src 'self'; frame-ancestors 'none'; base-uri 'none'"),
    (b"referrer-policy", b"no-referrer"),
    (b"x-content-type-options", b"nosniff"),
)


class TokenGate:
    """Lets requests with the token through to an application, and no others.

    Of those that it refuses it logs one a minute, with where they came from.

    Args:
        app: what is behind it; it has no unguarded route.
        token: the secret.

    Attributes:
        num_refused: requests without the right token so far.
    """

    def __init__(self, app: ASGIApp, token: str) -> None:
        self.num_refused = 0
        self._app = app
        self._token = token.encode()
        self._log_next_s = 0.0
        # Browsers share cookies between the ports of a host, so each token has a name of its own.
        self._cookie = f"cosmos-{hashlib.sha256(self._token).hexdigest()[:12]}"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return
        headers = {name.lower(): value for name, value in scope["headers"]}
        # A cookie is sent by whatever page a browser shows: it lets nobody change anything.
        reads = scope["method"] in {"GET", "HEAD"}
        is_known = reads and any(map(self._is_right, _cookies(headers, self._cookie)))
        if is_known or self._is_right(_bearer(headers)):
            await self._app(scope, receive, _guarded(send))
        elif scope["path"] == "/" and self._is_right(_token_of(scope["query_string"])):
            cookie = f"{self._cookie}={self._token.decode()}; Path=/; HttpOnly; SameSite=Strict"
            moved = [(b"location", b"/"), (b"set-cookie", cookie.encode())]
            await _answer(send, 303, moved, b"")
        else:
            self._count_refusal(scope)
            refused = [(b"www-authenticate", b"Bearer"), (b"content-type", b"text/plain")]
            await _answer(send, 401, refused, _REFUSAL.encode())

    def _count_refusal(self, scope: Scope) -> None:
        self.num_refused += 1
        now_s = time.monotonic()
        if now_s >= self._log_next_s:
            self._log_next_s = now_s + _LOG_EVERY_S
            host, *_ = scope.get("client") or ("an unknown address",)
            _LOG.warning(
                "a request from %s had a wrong token or none; %d so far", host, self.num_refused
            )

    def _is_right(self, token: bytes) -> bool:
        return secrets.compare_digest(token, self._token)


async def _answer(send: Send, status: int, headers: list[tuple[bytes, bytes]], body: bytes) -> None:
    length = (b"content-length", str(len(body)).encode())
    headers = [*headers, length, *_HEADERS]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _guarded(send: Send) -> Send:
    async def send_with_headers(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message["headers"], *_HEADERS]}
        await send(message)

    return send_with_headers


def _bearer(headers: dict[bytes, bytes]) -> bytes:
    kind, _, token = headers.get(b"authorization", b"").partition(b" ")
    return token.strip() if kind.lower() == b"bearer" else b""


def _cookies(headers: dict[bytes, bytes], name: str) -> Iterator[bytes]:
    """Yield the values of a cookie, whatever other servers of this host call or keep in theirs."""
    for cookie in headers.get(b"cookie", b"").split(b";"):
        found, _, value = cookie.strip().partition(b"=")
        if found == name.encode():
            yield value


def _token_of(query: bytes) -> bytes:
    return parse_qs(query.decode("latin-1")).get("token", [""])[-1].encode()
