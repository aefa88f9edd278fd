"""Which micro-batches of a rank are drawn by whom: a book of orders, without any input or output.

ordered ─► waiting ── somebody is free ─► drawn by them ── they bring it ─► done
              ▲                                │
              └──────────── they are lost ─────┘
"""

from collections import deque
from collections.abc import Iterable
from typing import Generic, TypeVar

from cosmos_wfm import RolloutOrder

Replica = TypeVar("Replica")


class OrderBook(Generic[Replica]):
    """Orders, and who is free; the earliest order goes to who has been free for longest."""

    def __init__(self) -> None:
        """Begin with none of either."""
        self._waiting: deque[RolloutOrder] = deque()
        self._free: deque[Replica] = deque()
        self._drawn_by: dict[RolloutOrder, Replica] = {}

    def order(self, orders: Iterable[RolloutOrder]) -> None:
        """Add orders, after those that wait."""
        self._waiting.extend(orders)

    def free(self, replica: Replica) -> None:
        """Note that somebody can draw one micro-batch more."""
        self._free.append(replica)

    def next(self) -> tuple[Replica, RolloutOrder] | None:
        """Return who is to draw what, which from now on they do; ``None`` if there is no pair."""
        if not self._free or not self._waiting:
            return None
        replica, order = self._free.popleft(), self._waiting.popleft()
        self._drawn_by[order] = replica
        return replica, order

    def bring(self, step: int, place: int) -> bool:
        """Note that a micro-batch came; return whether somebody had been told to draw it."""
        order = next((o for o in self._drawn_by if (o.step, o.place) == (step, place)), None)
        if order is None:
            return False
        del self._drawn_by[order]
        return True

    def lose(self, replica: Replica) -> int:
        """Put what somebody drew before everything that waits; return how many orders it was."""
        theirs = [order for order, who in self._drawn_by.items() if who == replica]
        for order in theirs:
            del self._drawn_by[order]
        self._waiting.extendleft(reversed(theirs))
        self._free = deque(who for who in self._free if who != replica)
        return len(theirs)
