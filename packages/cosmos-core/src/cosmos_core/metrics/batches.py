"""Points for a service that takes several at once: held back until there are enough of them."""

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

Point = TypeVar("Point")


class Batches(Generic[Point]):
    """Hands points on, so many at once, in their order; what was not taken stays.

    Args:
        send: hands some on, or raises.
        enough: how many are waited for.
        most: how many ``send`` takes at once.
    """

    def __init__(self, send: Callable[[Sequence[Point]], None], *, enough: int, most: int) -> None:
        self._send = send
        self._enough = enough
        self._most = most
        self._waiting = list[Point]()

    def add(self, points: Sequence[Point]) -> None:
        """Take points, and hand on what there is if that is enough.

        Whatever ``send`` raises is raised: then these may be added again, and those before wait.
        """
        self._waiting += points
        if len(self._waiting) < self._enough:
            return
        try:
            self.flush()
        except BaseException:
            left = len(self._waiting)
            del self._waiting[left - min(left, len(points)) :]
            raise

    def flush(self) -> None:
        """Hand on all that is left; whatever ``send`` raises is raised, and the rest waits."""
        while self._waiting:
            self._send(self._waiting[: self._most])
            del self._waiting[: self._most]
