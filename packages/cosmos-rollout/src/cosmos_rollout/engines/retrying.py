"""Requests to a server that is busy, or gone, for a moment: asked again, with a back-off.

What is worth asking again is what OpenAI's own client asks again: a broken or refused connection,
and answers that say "later" (408, 409, 429) or "my fault" (500 and above).
"""

import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import TypeVar

import httpx
from tenacity import (
    AsyncRetrying,
    RetryCallState,
    retry_if_exception_type,
    stop_any,
    stop_before_delay,
    wait_random_exponential,
)
from tenacity.stop import stop_base

from cosmos_rollout.errors import EngineError

_LATER = frozenset({408, 409, 429})
_FIRST_S = 0.5
_LONGEST_S = 8.0
_T = TypeVar("_T")


class BusyError(EngineError):
    """Raised for an answer that asks for another try.

    Attributes:
        after_s: seconds that the server wants to be left alone; 0: it does not say.
    """

    def __init__(self, words: str, *, after_s: float) -> None:
        super().__init__(words)
        self.after_s = after_s


def refused(url: str, response: httpx.Response, text: str) -> EngineError:
    """Return the error of an answer that is none: a `BusyError` if it may be another later."""
    words = f"{url} answered {response.status_code}: {text[:500]}"
    if response.status_code < 500 and response.status_code not in _LATER:
        return EngineError(words)
    return BusyError(words, after_s=_asked_s(response.headers.get("Retry-After", "")))


@dataclass(frozen=True, kw_only=True, slots=True)
class Patience:
    """How long a request is worth repeating.

    Attributes:
        whom: the server, for errors.
        answer_s: seconds from the first try within which the last one begins.
        connect_s: seconds in which nobody is there to connect to, one try after the other, after
            which nobody will be.
    """

    whom: str
    answer_s: float
    connect_s: float


async def patiently(ask: Callable[[], Awaitable[_T]], patience: Patience) -> _T:
    """Ask until there is an answer.

    Args:
        ask: sends the request from its beginning.
        patience: until when.

    Raises:
        EngineError: as ``ask`` raised it last, or since nobody could be connected to.
        httpx.TransportError: as ``ask`` raised it last.
    """
    absence = _Absence(patience.connect_s)

    async def asked() -> _T:
        return await ask()

    retrying = AsyncRetrying(
        retry=retry_if_exception_type((BusyError, httpx.TransportError)),
        wait=_wait_s,
        stop=stop_any(stop_before_delay(patience.answer_s), absence),
        reraise=True,
    )
    try:
        return await retrying(asked)
    except (httpx.ConnectError, httpx.ConnectTimeout) as error:
        raise EngineError(
            f"nobody is there at {patience.whom}: it could not be connected to for "
            f"{absence.lasts_s:.0f} s ({error})"
        ) from error


class _Absence(stop_base):
    """Stops trying when a server could not be connected to for too long, without a break."""

    def __init__(self, most_s: float) -> None:
        self._most_s = most_s
        self._since_s: float | None = None
        self.lasts_s = 0.0

    def __call__(self, state: RetryCallState) -> bool:
        """Whether the last try, and those before it, are enough."""
        error = state.outcome.exception() if state.outcome is not None else None
        now_s = state.seconds_since_start or 0.0
        if not isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
            self._since_s = None
            return False
        if self._since_s is None:
            self._since_s = now_s
        self.lasts_s = now_s - self._since_s
        return self.lasts_s + state.upcoming_sleep >= self._most_s


_BACK_OFF = wait_random_exponential(multiplier=_FIRST_S, max=_LONGEST_S, min=_FIRST_S / 2)


def _wait_s(state: RetryCallState) -> float:
    error = state.outcome.exception() if state.outcome is not None else None
    asked_s = error.after_s if isinstance(error, BusyError) else 0.0
    return asked_s + _BACK_OFF(state)  # all that were told to wait would come back at once


def _asked_s(header: str) -> float:
    """Return the seconds of a Retry-After, which may be a date; 0 for what is neither."""
    try:
        seconds = float(header)
    except ValueError:
        try:
            when = parsedate_to_datetime(header)
        except ValueError:
            return 0.0
        aware = when if when.tzinfo is not None else when.replace(tzinfo=UTC)
        seconds = (aware - datetime.now(UTC)).total_seconds()
    return max(0.0, seconds) if math.isfinite(seconds) else 0.0
