"""A point in time until which a wait may last, handed down through every blocking call."""

import time
from dataclasses import dataclass

from cosmos_weightsync.errors import DeadlineError

__all__ = ["Deadline"]


@dataclass(frozen=True, slots=True)
class Deadline:
    """A moment of the monotonic clock, in seconds."""

    at: float

    @classmethod
    def after(cls, seconds: float) -> "Deadline":
        """So many seconds from now."""
        return cls(time.monotonic() + seconds)

    def remaining(self, waiting_for: str) -> float:
        """Seconds left, always positive.

        Raises:
            DeadlineError: none are left; it says what was waited for.
        """
        left = self.at - time.monotonic()
        if left <= 0:
            raise DeadlineError(f"no time left waiting for {waiting_for}")
        return left
