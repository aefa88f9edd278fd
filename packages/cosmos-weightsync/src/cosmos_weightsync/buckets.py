"""The staging memory of a process: one bucket per device, of which edges borrow parts.

The bucket is the budget: what all edges at work hold at the same time lies in it. An edge that
gets no part waits for one and holds none meanwhile, so that those that hold some can end:

```
a part is free         lend it
none, and we hold one  end the message that is in it, then lend
none, and we hold none wait, first come, first served, until the deadline
```

A peer that hangs would keep others from the bucket for as long as its own deadline is. Where one
holds a part for longer than a moment, those that wait get another bucket, and that one's goes with
its message: in the worst case each edge has one of its own.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from cosmos_weightsync.arenas import ALIGNMENT
from cosmos_weightsync.deadlines import Deadline

__all__ = ["LEAST_BUCKET_BYTES", "Borrower", "BucketPool", "Loan", "half_of"]

LEAST_BUCKET_BYTES = 1024
"""Two messages of any dtype fit into it, or two frames of changes."""

_PATIENCE_S = 2.0


def half_of(bucket_bytes: int) -> int:
    """The size of half a bucket, aligned for any dtype."""
    return bucket_bytes // (2 * ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True, eq=False, slots=True)
class Loan:
    """Bytes ``start:stop`` of a bucket; ``view`` is as much of them as was asked for."""

    view: Tensor
    start: int
    stop: int
    since_s: float


class BucketPool:
    """Staging memory for small and strided pieces, shared by the edges of one process.

    The bucket of a device is allocated when a message first needs packing there, and kept for the
    next version. May be used from any thread.

    Args:
        bucket_bytes: The size of the bucket, for all edges together; messages are at most half so
            long.
        owner: Whose it is, for the error of an edge that waits in vain: ``sender rank 3``.
        patience_s: How long a message may be under way while others wait for its part.
    """

    def __init__(
        self, bucket_bytes: int, owner: str = "this process", *, patience_s: float = _PATIENCE_S
    ) -> None:
        self.bucket_bytes = bucket_bytes
        self._patience_s = patience_s
        self._owner = owner
        self._buckets: dict[torch.device, Tensor] = {}
        self._lent: dict[torch.device, list[Loan]] = {}
        self._waiting: deque[object] = deque()
        self._changed = threading.Condition()

    @property
    def num_waiting(self) -> int:
        """How many edges wait for a part now."""
        return len(self._waiting)

    @contextmanager
    def borrow(self, least_bytes: int = 0) -> "Generator[Borrower]":
        """For one edge: what it has not given back at the end is taken back.

        Args:
            least_bytes: What each part takes up at least; edges that all take the same leave no
                gaps in which nothing fits.
        """
        borrower = Borrower(self, least_bytes)
        try:
            yield borrower
        finally:
            for loan in tuple(borrower.loans):
                borrower.give_back(loan)

    def lend(self, num_bytes: int, least_bytes: int, device: torch.device) -> Loan | None:
        """A part of the bucket, if one is free and nobody waits."""
        with self._changed:
            return None if self._waiting else self._free_part(num_bytes, least_bytes, device)

    def await_part(
        self, num_bytes: int, least_bytes: int, device: torch.device, deadline: Deadline
    ) -> Loan:
        """A part of the bucket, in turn; who waits must hold none.

        Raises:
            DeadlineError: it was not its turn in time.
        """
        turn = object()

        def free() -> Loan | None:
            is_next = self._waiting[0] is turn
            return self._free_part(num_bytes, least_bytes, device) if is_next else None

        with self._changed:
            self._waiting.append(turn)
            try:
                while True:
                    limit_s = deadline.remaining(f"a part of the bucket of {self._owner}")
                    loan = self._changed.wait_for(free, min(limit_s, self._patience_s))
                    if loan is not None:
                        return loan
                    if self._waiting[0] is turn:
                        self._replace_if_held(device)
            finally:
                self._waiting.remove(turn)
                self._changed.notify_all()

    def give_back(self, loan: Loan) -> None:
        """The message in this part is done."""
        with self._changed:
            lent = self._lent[loan.view.device]
            if loan in lent:  # not if its bucket was replaced
                lent.remove(loan)
            self._changed.notify_all()

    def _replace_if_held(self, device: torch.device) -> None:
        """Leave the bucket to a message that is under way for too long, and take another."""
        place = self._bucket(device).device
        held_since = min((loan.since_s for loan in self._lent[place]), default=time.monotonic())
        if time.monotonic() - held_since >= self._patience_s:
            for named in [d for d, bucket in self._buckets.items() if bucket.device == place]:
                del self._buckets[named]
            self._lent[place].clear()

    def _free_part(self, num_bytes: int, least_bytes: int, device: torch.device) -> Loan | None:
        """The first gap that is wide enough."""
        bucket = self._bucket(device)
        lent = self._lent[bucket.device]
        size = max(num_bytes, least_bytes)
        start = number = 0
        while number < len(lent) and lent[number].start < start + size:
            start = -(-lent[number].stop // ALIGNMENT) * ALIGNMENT
            number += 1
        if start + size > self.bucket_bytes:
            return None
        loan = Loan(bucket[start : start + num_bytes], start, start + size, time.monotonic())
        lent.insert(number, loan)
        return loan

    def _bucket(self, device: torch.device) -> Tensor:
        bucket = self._buckets.get(device)
        if bucket is None:
            bucket = torch.empty(self.bucket_bytes, dtype=torch.uint8, device=device)
            bucket = self._buckets.setdefault(bucket.device, bucket)
            self._buckets[device] = bucket
            self._lent[device] = self._lent.setdefault(bucket.device, [])
        return bucket


class Borrower:
    """One edge's share of a `BucketPool`. Used by one thread."""

    def __init__(self, pool: BucketPool, least_bytes: int) -> None:
        self._pool = pool
        self._least_bytes = least_bytes
        self.loans: list[Loan] = []

    def take(
        self,
        num_bytes: int,
        device: torch.device,
        deadline: Deadline,
        end_all: Callable[[], None] = lambda: None,
    ) -> Loan:
        """A part for one message.

        Args:
            num_bytes: How long the message is.
            device: Where it must lie.
            deadline: How long to wait for it.
            end_all: Ends all messages of this edge that are under way, and gives their parts back.

        Raises:
            DeadlineError: it was not its turn in time.
        """
        loan = self._pool.lend(num_bytes, self._least_bytes, device)
        if loan is None:
            end_all()
            assert not self.loans, "who waits holds nothing"
            loan = self._pool.await_part(num_bytes, self._least_bytes, device, deadline)
        self.loans.append(loan)
        return loan

    def give_back(self, loan: Loan) -> None:
        """The message in it is done."""
        self.loans.remove(loan)
        self._pool.give_back(loan)
