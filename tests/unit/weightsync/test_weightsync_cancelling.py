"""What must not be given up half-way is done, however often its waiter is cancelled."""

import asyncio

import pytest

from cosmos_weightsync.integrations.cancelling import carry_through


async def cancelled_often(times: int) -> tuple[list[str], asyncio.Task[int]]:
    """A task that waits for work of two steps, and is cancelled so often in between."""
    steps: list[str] = []
    begun, goes_on = asyncio.Event(), asyncio.Event()

    async def work() -> int:
        steps.append("paused")
        begun.set()
        await goes_on.wait()
        steps.append("resumed")
        return 7

    task = asyncio.create_task(carry_through(work()))
    await begun.wait()
    for _ in range(times):
        task.cancel()
        for _ in range(5):  # Let it be told of each.
            await asyncio.sleep(0)
    goes_on.set()
    await asyncio.wait([task])
    return steps, task


@pytest.mark.parametrize("times", [1, 2, 3])
def test_work_ends_before_the_cancelled_waiter_does(times):
    steps, task = asyncio.run(cancelled_often(times))
    assert steps == ["paused", "resumed"]
    assert task.cancelled()


def test_without_a_cancellation_the_result_is_returned():
    steps, task = asyncio.run(cancelled_often(0))
    assert (steps, task.result()) == (["paused", "resumed"], 7)


def test_a_failure_is_said_also_to_a_waiter_that_was_cancelled():
    async def fail() -> None:
        await asyncio.sleep(0)
        raise ValueError("broken")

    async def run() -> BaseException | None:
        task = asyncio.create_task(carry_through(fail()))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        return task.exception()

    assert isinstance(asyncio.run(run()), ValueError)
