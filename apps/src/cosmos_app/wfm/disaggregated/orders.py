"""Which micro-batches of a rank are drawn by whom: a book of orders, without any input or output.

ordered ─► waiting ── somebody is free ─► drawn by them ── they bring it ─► done
              ▲                                │
              └── they are lost, or silent ────┘

Who was silent may wake up: it is then as free as before, and what it brings is taken if nobody has
brought it yet, whoever draws it now.
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
        self._taken_back: set[RolloutOrder] = set()
        self._silent: list[Replica] = []  # each as often as it was free

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
        """Note that a micro-batch came; return whether it had to be drawn and had not come yet."""
        told = [*self._drawn_by, *self._taken_back]
        order = next((o for o in told if (o.step, o.place) == (step, place)), None)
        if order is None:
            return False
        self._drawn_by.pop(order, None)
        if order in self._taken_back:
            self._taken_back.remove(order)
            self._waiting = deque(each for each in self._waiting if each != order)
        return True

    def lose(self, replica: Replica) -> int:
        """Have what somebody drew wait again, the earliest first; return how many orders it was."""
        theirs = [order for order, who in self._drawn_by.items() if who == replica]
        for order in theirs:
            del self._drawn_by[order]
        self._taken_back.update(theirs)
        again = sorted([*theirs, *self._waiting], key=lambda order: (order.step, order.place))
        self._waiting = deque(again)
        self._free = deque(who for who in self._free if who != replica)
        self._silent = [who for who in self._silent if who != replica]
        return len(theirs)

    def suspend(self, replica: Replica) -> int:
        """Give what somebody draws to others, and no more to them until they ``wake``.

        Returns:
            How many orders it was.
        """
        silent = [*self._silent, *(who for who in self._free if who == replica)]
        num = self.lose(replica)
        self._silent = silent
        return num

    def wake(self, replica: Replica) -> None:
        """Note that somebody who was suspended speaks again."""
        self._free.extend(who for who in self._silent if who == replica)
        self._silent = [who for who in self._silent if who != replica]
