"""The same as `Occupancy`, told one after the other: a span for each state that a replica was in.

Requests come and go with every token or so; a span of decoding has their number on average.
"""

from collections.abc import Mapping
from typing import Protocol

from cosmos_core.simulation import Activity, Diary

ACTIVITIES: Mapping[str, Activity] = {
    "idle_no_work": "idle_no_work",
    "decoding": "decode",
    "waiting_for_environment": "env_wait",
    "waiting_for_rewards": "reward_wait",
}


class Engine(Protocol):
    """What is looked at; a `RolloutEngine` has it."""

    @property
    def num_tokens_generated(self) -> int:
        """Tokens sampled since the start."""
        ...

    @property
    def weight_version(self) -> int:
        """The version that samples the next token."""
        ...


class OccupancySpans:
    """Writes a replica's states into its diary.

    Args:
        diary: where they are written; ``None``: nowhere. Whoever takes commands tells it of groups
            that come (`Diary.given`).
        engine: of the replica.
        now: seconds of the diary's clock.
    """

    def __init__(self, diary: Diary | None, engine: Engine, now: float) -> None:
        self._diary = diary
        self._engine = engine
        self._state = "idle_no_work"
        self._requests = 0
        self._since = now
        self._request_seconds = 0.0
        self._num_tokens = engine.num_tokens_generated

    def account(self, state: str, requests: int, now: float) -> None:
        """Note the state and the requests from ``now`` on."""
        self._request_seconds += self._requests * (now - self._since)
        self._requests, self._since = requests, now
        if state != self._state:
            self.tell(now)
            self._state = state

    def stalled(self, seconds: float, now: float) -> None:
        """Note that until ``now`` the engine stood still so long for a weight swap."""
        self.tell(now - seconds)
        if self._diary is not None:
            self._diary.note("swap", now, version=self._engine.weight_version)

    def tell(self, now: float) -> None:
        """Write down the present state until ``now``."""
        if self._diary is None or now <= self._diary.until_s:
            return
        self._request_seconds += self._requests * max(0.0, now - self._since)
        self._since = max(now, self._since)
        width, tokens = 0, 0
        if self._state == "decoding":
            width = round(self._request_seconds / (now - self._diary.until_s))
            num_tokens = self._engine.num_tokens_generated
            tokens, self._num_tokens = num_tokens - self._num_tokens, num_tokens
        self._request_seconds = 0.0
        self._diary.note(
            ACTIVITIES[self._state],
            now,
            version=self._engine.weight_version,
            width=width,
            tokens=tokens,
        )
