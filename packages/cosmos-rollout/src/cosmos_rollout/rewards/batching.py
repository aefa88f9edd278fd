"""Calls that come one by one, made in batches that are as large as they are quick.

A hand-over to a worker process costs more than a short computation. While a lane is busy, calls
wait; when it is free it takes as many as it expects to finish within `BATCH_S`. Slow computations
thus go one at a time, over all lanes, and quick ones by the dozen.
"""

import asyncio
import itertools
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

BATCH_S = 0.02
MAX_BATCH = 64
_MEMORY = 0.8

Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True, eq=False, slots=True)
class _Call(Generic[Item, Result]):
    item: Item
    result: asyncio.Future[Result]


class Batcher(Generic[Item, Result]):
    """Gathers single calls into batches.

    Args:
        run: computes a batch; results in the order of the items. It is cancelled once nobody
            waits for any of them.
        num_lanes: batches under way at once.
    """

    def __init__(
        self, run: Callable[[Sequence[Item]], Awaitable[Sequence[Result]]], *, num_lanes: int
    ) -> None:
        self._run = run
        self._num_lanes = num_lanes
        self._waiting: deque[_Call[Item, Result]] = deque()
        self._batches: dict[asyncio.Task[None], Sequence[_Call[Item, Result]]] = {}
        self._item_s = BATCH_S  # the first batch is of one item

    async def call(self, item: Item) -> Result:
        """Compute one item in a batch with others."""
        call = _Call(item, asyncio.get_running_loop().create_future())
        self._waiting.append(call)
        self._fill_lanes()
        return await call.result

    async def aclose(self) -> None:
        """Give up everything under way; those who wait are cancelled. Idempotent."""
        batches = tuple(self._batches)
        for call in (*self._waiting, *itertools.chain(*self._batches.values())):
            call.result.cancel()
        self._waiting.clear()
        await asyncio.gather(*batches)

    def _fill_lanes(self) -> None:
        while self._waiting and len(self._batches) < self._num_lanes:
            size = max(1, min(MAX_BATCH, int(BATCH_S / self._item_s)))
            taken = [self._waiting.popleft() for _ in range(min(size, len(self._waiting)))]
            calls = [call for call in taken if not call.result.done()]
            if calls:
                batch = asyncio.create_task(self._finish(calls))
                self._batches[batch] = calls
                batch.add_done_callback(self._ended)

    def _ended(self, batch: asyncio.Task[None]) -> None:
        del self._batches[batch]
        self._fill_lanes()

    async def _finish(self, calls: Sequence[_Call[Item, Result]]) -> None:
        work = asyncio.ensure_future(self._run([call.item for call in calls]))

        def give_up_if_unwanted(_: asyncio.Future[Result]) -> None:
            if all(call.result.cancelled() for call in calls):
                work.cancel()

        for call in calls:
            call.result.add_done_callback(give_up_if_unwanted)
        started = time.monotonic()
        await asyncio.wait([work])
        item_s = (time.monotonic() - started) / len(calls)
        self._item_s = _MEMORY * self._item_s + (1 - _MEMORY) * max(item_s, 1e-6)
        _hand_out(work, [call.result for call in calls])


def _hand_out(
    work: asyncio.Future[Sequence[Result]], waiting: Sequence[asyncio.Future[Result]]
) -> None:
    """Give everybody who still waits a result, or the error that all share."""
    error = None if work.cancelled() else work.exception()
    for index, result in enumerate(waiting):
        if result.done():
            continue
        if work.cancelled():
            result.cancel()
        elif error is not None:
            result.set_exception(error)
        else:
            result.set_result(work.result()[index])
