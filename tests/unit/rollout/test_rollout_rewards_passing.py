"""Which failures of a reward may pass: somebody it asks is away, or slow; not its own mistakes."""

import errno
import socket
import urllib.request
from collections.abc import Callable

import httpx
import pytest

from cosmos_rollout import RewardError
from cosmos_rollout.rewards.passing import may_pass


def nobody_listens() -> str:
    """Return an address at which nobody is."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"http://127.0.0.1:{server.getsockname()[1]}/"


def raised_by(call: Callable[[], object]) -> Exception:
    with pytest.raises(Exception) as raised:  # noqa: PT011 - whatever a client raises
        call()
    return raised.value


def wrapped(url: str) -> None:
    try:
        httpx.get(url, trust_env=False)
    except httpx.HTTPError:
        raise RuntimeError("the judge does not answer") from None


@pytest.mark.parametrize(
    "ask",
    [
        lambda url: httpx.get(url, trust_env=False),
        lambda url: urllib.request.urlopen(url, timeout=5.0),
        lambda url: socket.create_connection(("127.0.0.1", int(url[17:-1])), timeout=5.0),
        wrapped,
    ],
)
def test_a_server_that_is_away_may_come_back_whatever_client_asked_it(ask) -> None:
    url = nobody_listens()
    assert may_pass(raised_by(lambda: ask(url)))


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (TimeoutError(), True),
        (socket.gaierror(socket.EAI_AGAIN, "try again"), True),
        (OSError(errno.ENETUNREACH, "no way there"), True),
        (RewardError("busy", passes=True), True),
        (RewardError("no answer in the row"), False),
        (ValueError("no number in the response"), False),
        (FileNotFoundError(errno.ENOENT, "no such file"), False),
        (MemoryError(), False),
    ],
)
def test_mistakes_are_told_from_what_may_pass(error: Exception, expected: bool) -> None:
    assert may_pass(error) == expected


def test_errors_that_are_each_other_s_cause_are_looked_at_once() -> None:
    first, second = ValueError(), ValueError()
    first.__cause__, second.__cause__ = second, first
    assert not may_pass(first)
