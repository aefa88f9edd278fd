"""Waiting for what must not be given up half-way, in a task that may be cancelled meanwhile."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

__all__ = ["carry_through"]

T = TypeVar("T")


async def carry_through(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end, however often whoever waits for it is cancelled.

    Args:
        work: Runs in a task of its own.

    Returns:
        What the work returns, if nobody was cancelled.

    Raises:
        CancelledError: whoever waits was cancelled; the work is done.
        Exception: what the work raises, also where whoever waits was cancelled.
    """
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            cancelled = error
    result = task.result()
    if cancelled is not None:
        raise cancelled
    return result
