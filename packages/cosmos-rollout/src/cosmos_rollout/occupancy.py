"""Where the time of a rollout replica goes: by state, by slot, and by token capacity."""

from collections.abc import Mapping
from dataclasses import dataclass

from cosmos_core.activity import ActivityMeter

STATES = (
    "idle_no_work",
    "gated_staleness",
    "decoding",
    "waiting_for_environment",
    "waiting_for_rewards",
    "paused_for_weights",
)

EMPTY_STATES = ("idle_no_work", "gated_staleness")
"""Those of a replica that holds nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OccupancyReading:
    """Totals since the start; the difference of two readings is what happened in between.

    Attributes:
        elapsed_s: seconds since the start.
        seconds: seconds in each of `STATES`; they sum to ``elapsed_s``. Without a group it is in
            ``gated_staleness`` where admission withheld one, as the next group tells.
        withheld_before_s: of that, what earlier readings told as ``idle_no_work``.
        slot_seconds: seconds of a slot holding a group, summed over slots.
        request_seconds: seconds of a request being decoded, summed over requests.
        num_tokens: tokens generated.
        peak_tokens_per_s: highest rate between two readings so far.
        slots: how many slots there are.
    """

    elapsed_s: float
    seconds: Mapping[str, float]
    slot_seconds: float
    request_seconds: float
    num_tokens: int
    peak_tokens_per_s: float
    slots: int
    withheld_before_s: float = 0.0

    @property
    def slot_share(self) -> float:
        """Fraction of the slots' time that held a group."""
        return self.slot_seconds / (self.slots * self.elapsed_s) if self.elapsed_s else 0.0

    @property
    def token_share(self) -> float:
        """Tokens generated, as a fraction of what the peak rate would have given."""
        capacity = self.peak_tokens_per_s * self.elapsed_s
        return self.num_tokens / capacity if capacity else 0.0


class Occupancy:
    """Adds up the above. Time is passed in: seconds of any monotonic clock.

    Args:
        slots: groups that can be in work at once.
        now: the time it starts.
    """

    def __init__(self, slots: int, now: float) -> None:
        self._slots = slots
        self._start = self._since = now
        self._meter = ActivityMeter(STATES, now)
        self._groups = self._requests = 0
        self._slot_seconds = self._request_seconds = self._paused_s = 0.0
        self._withheld_s = self._withheld_before_s = self._idle_read_s = 0.0
        self._peak = 0.0
        self._last = (now, 0)
        self._decoding_since: float | None = None

    @property
    def state(self) -> str:
        """Which of `STATES` it is in, of those that are known at once."""
        return self._meter.state

    def account(self, *, groups: int, requests: int, now: float, episodes: int = 0) -> None:
        """Note what is in work from ``now`` on.

        Args:
            groups: that are in work.
            requests: in the engine.
            now: when that is so.
            episodes: that are played with an environment. Without requests it has all of them.
        """
        self._integrate(now)
        self._groups, self._requests = groups, requests
        if requests:
            state = "decoding"
        elif episodes:
            state = "waiting_for_environment"
        else:
            state = "waiting_for_rewards" if groups else "idle_no_work"
        self._meter.enter(state, now)
        if not requests:
            self._decoding_since = None
        elif self._decoding_since is None:
            self._decoding_since = now

    def stalled(self, seconds: float, now: float) -> None:
        """Note that until ``now`` the engine stood still so long for a weight swap.

        What it would not have decoded in stays what it was, and so does what was read already: the
        difference of two readings is never negative.
        """
        if self._decoding_since is not None:
            self._paused_s += min(seconds, now - self._decoding_since)
            self._decoding_since = now

    def given(self, withheld_s: float, now: float) -> None:
        """Note that a group came, and for how long admission had withheld one until now.

        What was read already stays what it was.
        """
        idle_s = self._meter.seconds(now)["idle_no_work"] - self._withheld_s
        untold_s = min(withheld_s, max(0.0, idle_s - self._idle_read_s))
        self._withheld_s += untold_s
        self._withheld_before_s += min(withheld_s - untold_s, self._idle_read_s)

    def read(self, num_tokens: int, now: float) -> OccupancyReading:
        """Return the totals until ``now``; ``num_tokens`` is the engine's counter."""
        self._integrate(now)
        seconds = self._meter.seconds(now)
        seconds["decoding"] -= self._paused_s
        seconds["paused_for_weights"] += self._paused_s
        seconds["idle_no_work"] -= self._withheld_s
        seconds["gated_staleness"] += self._withheld_s
        self._idle_read_s = seconds["idle_no_work"]
        if self._decoding_since is not None:
            self._decoding_since = now
        since, before = self._last
        if now > since:
            self._peak = max(self._peak, (num_tokens - before) / (now - since))
            self._last = (now, num_tokens)
        return OccupancyReading(
            elapsed_s=now - self._start,
            seconds=seconds,
            slot_seconds=self._slot_seconds,
            request_seconds=self._request_seconds,
            num_tokens=num_tokens,
            peak_tokens_per_s=self._peak,
            slots=self._slots,
            withheld_before_s=self._withheld_before_s,
        )

    def _integrate(self, now: float) -> None:
        self._slot_seconds += self._groups * (now - self._since)
        self._request_seconds += self._requests * (now - self._since)
        self._since = now
