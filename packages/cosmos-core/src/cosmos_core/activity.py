"""Where the time of a loop goes: seconds and shares of each state it was in.

The caller passes the time in, from any monotonic clock in seconds, so that a test or a simulation
accounts in the same way as a running replica.
"""

from collections.abc import Mapping, Sequence


class ActivityMeter:
    """Adds up the seconds spent in each of a fixed set of states, one state at a time.

    Starts in the first state at ``now``::

        meter = ActivityMeter(("idle", "training"), now=0.0)
        meter.enter("training", now=1.0)
        meter.shares(now=4.0)  # {"idle": 0.25, "training": 0.75}

    Args:
        states: the states there are; the first is the one it starts in.
        now: seconds of the caller's monotonic clock.
    """

    def __init__(self, states: Sequence[str], now: float) -> None:
        if not states or len(set(states)) != len(states):
            raise ValueError(f"states have to be distinct and at least one, found {states!r}")
        self._seconds = dict.fromkeys(states, 0.0)
        self._state = states[0]
        self._since = now

    @property
    def state(self) -> str:
        """The state it is in."""
        return self._state

    def enter(self, state: str, now: float) -> None:
        """Leave the present state for ``state``; entering the present one again changes nothing.

        Raises:
            ValueError: if there is no such state, or ``now`` lies before the last call.
        """
        if state not in self._seconds:
            raise ValueError(f"no state {state!r}; there are {', '.join(self._seconds)}")
        self._seconds[self._state] += self._elapsed(now)
        self._state, self._since = state, now

    def seconds(self, now: float) -> dict[str, float]:
        """Seconds spent in each state until ``now``, the present one included."""
        seconds = dict(self._seconds)
        seconds[self._state] += self._elapsed(now)
        return seconds

    def shares(self, now: float) -> dict[str, float]:
        """Fraction of the time until ``now`` spent in each state; they sum to 1.

        Before any time has passed all of it belongs to the present state.
        """
        seconds = self.seconds(now)
        if not any(seconds.values()):
            seconds[self._state] = 1.0
        return shares_of(seconds)

    def _elapsed(self, now: float) -> float:
        if now < self._since:
            raise ValueError(f"time runs backwards: {now} comes before {self._since}")
        return now - self._since


def shares_of(
    seconds: Mapping[str, float], since: Mapping[str, float] | None = None
) -> dict[str, float]:
    """Turn seconds per state into fractions that sum to 1, or to 0 where no time has passed.

    ``since`` is an earlier reading of the same meter: the shares are then those of the time between
    the two readings, which is what a report per step wants.
    """
    before = since or {}
    spent = {state: value - before.get(state, 0.0) for state, value in seconds.items()}
    total = sum(spent.values())
    return {state: value / total if total else 0.0 for state, value in spent.items()}
