"""A point in time until which a wait may last, handed down through every blocking call."""

import math
import time
from dataclasses import dataclass, replace

from cosmos_weightsync.errors import ConfigurationError, DeadlineError

__all__ = ["Deadline"]

_LONGEST_S = 1e8
"""Three years, for who says infinity: the system's own clocks take no more than so much."""


@dataclass(frozen=True, slots=True)
class Deadline:
    """A moment of the monotonic clock, in seconds.

    Attributes:
        at: The moment.
        longest_wait_s: How long a single wait may last on the way there; a peer that is silent
            for longer counts as lost though the whole may still take its time.
    """

    at: float
    longest_wait_s: float = math.inf

    @classmethod
    def after(cls, seconds: float) -> "Deadline":
        """So many seconds from now; infinitely many are three years.

        Raises:
            ConfigurationError: the seconds are no number.
        """
        if math.isnan(seconds):
            raise ConfigurationError("a wait of 'nan' seconds is no wait")
        return cls(time.monotonic() + min(seconds, _LONGEST_S))

    def within(self, seconds: float) -> "Deadline":
        """This moment, or so many seconds from now if that is sooner."""
        return replace(self, at=min(self.at, time.monotonic() + seconds))

    def with_patience(self, seconds: float) -> "Deadline":
        """The same moment, with single waits of at most so many seconds."""
        return replace(self, longest_wait_s=seconds)

    def remaining(self, waiting_for: str) -> float:
        """Seconds that the next wait may last, always positive.

        Raises:
            DeadlineError: none are left; it says what was waited for.
        """
        left = self.at - time.monotonic()
        if left <= 0:
            raise DeadlineError(f"no time left waiting for {waiting_for}")
        return min(left, self.longest_wait_s)
