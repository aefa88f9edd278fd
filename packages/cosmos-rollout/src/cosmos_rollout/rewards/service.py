"""A reward that somebody's HTTP service gives: a judge, a compiler farm, a model on other devices.

    POST url  {"prompt": "12+30=", "response": "42", "answer": "42", "fields": {...}, ...}
              {"reward": 1.0}

The request has all that a `RewardInput` has, by its names.
"""

import math
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import httpx

from cosmos_rollout.errors import RewardError, UserCodeError
from cosmos_rollout.rewards.scoring import RewardFunction, RewardInput

_BUSY = frozenset({408, 429, 502, 503, 504})
_REFUSED = frozenset({401, 403})
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 1.0
_MOST_WORDS = 200


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
        if not self.url.startswith(("http://", "https://")):
            raise ValueError(f"url has to begin with http:// or https://, found {self.url!r}")
        if not 0.0 < self.timeout_s < math.inf:
            raise ValueError(f"timeout_s is {self.timeout_s}; it must be positive and finite")

    def build(self) -> RewardFunction:
        """Look whether somebody is there, and return the function.

        Raises:
            UserCodeError: if nobody is, or the token cannot be read or is refused.
        """
        headers: dict[str, str] = {}
        if self.key_file is not None:
            try:
                headers["Authorization"] = f"Bearer {self.key_file.read_text().strip()}"
            except OSError as error:
                raise UserCodeError(f"reward {self.name}: its key_file: {error}") from error
        # no proxy from the environment
        client = httpx.Client(headers=headers, timeout=self.timeout_s, trust_env=False)
        try:
            status = client.get(self.url).status_code  # any answer will do
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

    def _score(self, client: httpx.Client, sample: RewardInput) -> float:
        given, until = asdict(sample), time.monotonic() + self.timeout_s
        pause_s = _FIRST_PAUSE_S
        while True:
            try:
                left_s = max(until - time.monotonic(), _FIRST_PAUSE_S)
                response = client.post(self.url, json=given, timeout=left_s)
                if response.status_code not in _BUSY:
                    return self._value(response)
                said = f"it is busy ({response.status_code})"
            except httpx.TransportError as error:
                said = repr(error)
            if time.monotonic() + pause_s >= until:
                raise RewardError(f"{self.url} gave no answer in {self.timeout_s:g} s: {said}")
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _value(self, response: httpx.Response) -> float:
        words = response.text[:_MOST_WORDS]
        if response.is_error:
            raise RewardError(f"{self.url} answered {response.status_code}: {words}")
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
