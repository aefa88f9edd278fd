"""Single calls become batches, no larger than is quick."""

import asyncio
import itertools
from collections.abc import Sequence

import pytest

from cosmos_rollout.rewards.batching import BATCH_S, Batcher


class Squares:
    """Squares numbers, notes the batches, and takes as long as it is told."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds = seconds
        self.batches: list[list[int]] = []
        self.cancelled = 0

    async def __call__(self, numbers: Sequence[int]) -> list[int]:
        self.batches.append(list(numbers))
        try:
            await asyncio.sleep(self.seconds * len(numbers))
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if -1 in numbers:
            raise ValueError("minus one")
        return [number * number for number in numbers]


async def test_quick_calls_share_batches_and_each_gets_its_own_result() -> None:
    squares = Squares()
    batcher = Batcher(squares, num_lanes=1)
    for _ in range(5):
        results = await asyncio.gather(*(batcher.call(number) for number in range(100)))
        assert results == [number * number for number in range(100)]
    assert sorted(itertools.chain(*squares.batches)) == sorted(list(range(100)) * 5)
    assert len(squares.batches) < 100
    assert max(map(len, squares.batches)) > 10


async def test_slow_calls_go_one_at_a_time_over_all_lanes() -> None:
    squares = Squares(seconds=1.5 * BATCH_S)
    batcher = Batcher(squares, num_lanes=2)
    await asyncio.gather(*(batcher.call(number) for number in range(6)))
    assert [len(batch) for batch in squares.batches] == [1] * 6


async def test_an_error_is_raised_to_everybody_in_the_batch_and_the_next_goes_on() -> None:
    batcher = Batcher(Squares(), num_lanes=1)
    with pytest.raises(ValueError, match="minus one"):
        await batcher.call(-1)
    assert await batcher.call(3) == 9


async def test_a_batch_that_nobody_waits_for_is_cancelled() -> None:
    squares = Squares(seconds=60.0)
    batcher = Batcher(squares, num_lanes=1)
    call = asyncio.create_task(batcher.call(1))
    await asyncio.sleep(0.01)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    squares.seconds = 0.0
    assert await batcher.call(2) == 4
    assert squares.cancelled == 1


async def test_closing_cancels_those_who_wait() -> None:
    batcher = Batcher(Squares(seconds=60.0), num_lanes=1)
    calls = [asyncio.create_task(batcher.call(number)) for number in range(3)]
    await asyncio.sleep(0.01)
    await batcher.aclose()
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    assert all(isinstance(outcome, asyncio.CancelledError) for outcome in outcomes)
