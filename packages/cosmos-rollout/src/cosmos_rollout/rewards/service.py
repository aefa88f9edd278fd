"""A reward that somebody's HTTP service gives: a judge, a compiler farm, a model on other devices.

    POST url  {"prompt": "12+30=", "response": "42", "answer": "42", "fields": {...}, ...}
              {"reward": 1.0}

The request has all that a `RewardInput` has, by its names; `sample_from_json` reads it.
"""

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import httpx
from tenacity import Retrying, retry_if_exception_type, stop_before_delay, wait_exponential

from cosmos_rollout.errors import RewardError, UserCodeError
from cosmos_rollout.rewards.scoring import RewardFunction, RewardInput
from cosmos_rollout.web_addresses import check_url, headers_of

_BUSY = frozenset({408, 429, 502, 503, 504})
_REFUSED = frozenset({401, 403})
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 1.0
_MOST_WORDS = 200


class _BusyError(Exception):
    """An answer that asks for another try."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ServiceReward:
    """The number that a service answers for a sample.

    Attributes:
        kind: selects this reward.
        url: gets a POST for each sample: JSON with the fields of `RewardInput`. It answers
            ``{"reward": number}``.
        key_file: file that holds the bearer token; None: none is sent.
        timeout_s: how long a service that is busy (408, 429, 502 to 504), restarted or slow is
            asked again and waited for. Shorter than that of the pool, which ends a worker.
        name: its name in trajectories and reports.
        weight: its factor in the total.
    """

    kind: Literal["service"] = "service"
    url: str
    key_file: Path | None = None
    timeout_s: float = 8.0
    name: str = "service"
    weight: float = 1.0

    def __post_init__(self) -> None:
        check_url(self.url)
        if not 0.0 < self.timeout_s < math.inf:
            raise ValueError(f"timeout_s is {self.timeout_s}; it must be positive and finite")

    def build(self) -> RewardFunction:
        """Wait until somebody is there, and return the function.

        Raises:
            UserCodeError: if nobody is in ``timeout_s``, or the token cannot be read or is refused.
        """
        try:
            headers = headers_of(self.key_file)
        except OSError as error:
            raise UserCodeError(f"reward {self.name}: its key_file: {error}") from error
        # no proxy from the environment
        client = httpx.Client(headers=headers, timeout=self.timeout_s, trust_env=False)
        try:  # any answer will do
            status = self._answer(lambda left_s: client.get(self.url, timeout=left_s)).status_code
        except httpx.HTTPError as error:
            client.close()
            raise UserCodeError(
                f"reward {self.name}: nobody answers at {self.url} ({error!r}); start the service "
                "first"
            ) from error
        if status in _REFUSED:
            client.close()
            raise UserCodeError(f"reward {self.name}: {self.url} refuses the token ({status})")
        return lambda sample: self._score(client, sample)

    def _answer(self, ask: Callable[[float], httpx.Response]) -> httpx.Response:
        """Ask until there is an answer, by what is given the seconds that are left.

        Raises:
            _BusyError: if ``ask`` raises nothing else in ``timeout_s``.
            httpx.TransportError: likewise.
        """
        until = time.monotonic() + self.timeout_s
        retrying = Retrying(
            retry=retry_if_exception_type((_BusyError, httpx.TransportError)),
            wait=wait_exponential(multiplier=_FIRST_PAUSE_S, max=_LONGEST_PAUSE_S),
            stop=stop_before_delay(self.timeout_s),
            reraise=True,
        )
        return retrying(lambda: ask(max(until - time.monotonic(), _FIRST_PAUSE_S)))

    def _score(self, client: httpx.Client, sample: RewardInput) -> float:
        given = asdict(sample)

        def ask(left_s: float) -> httpx.Response:
            response = client.post(self.url, json=given, timeout=left_s)
            if response.status_code in _BUSY:
                raise _BusyError(f"it is busy ({response.status_code})")
            return response

        try:
            return self._value(self._answer(ask))
        except (_BusyError, httpx.TransportError) as error:
            said = str(error) if isinstance(error, _BusyError) else repr(error)
            raise RewardError(
                f"{self.url} gave no answer in {self.timeout_s:g} s: {said}", passes=True
            ) from error

    def _value(self, response: httpx.Response) -> float:
        words = response.text[:_MOST_WORDS]
        if response.is_error:
            said = f"{self.url} answered {response.status_code}: {words}"
            raise RewardError(said, passes=True)
        try:
            found: Any = response.json()
            value = found["reward"]
        except (ValueError, KeyError, TypeError) as error:
            raise RewardError(
                f'{self.url} answered {words!r}; it has to be {{"reward": a number}}'
            ) from error
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise RewardError(f"{self.url} answered the reward {value!r}, which is no number")
        return float(value)
