"""Waiting for what must not be given up half-way, in a task that may be cancelled meanwhile."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


async def carry_through(work: Coroutine[Any, Any, T]) -> T:
    """Run ``work`` to its end in a task of its own, however often who waits is cancelled.

    Raises:
        CancelledError: afterwards, if who waits was cancelled and the work did not fail.
        Exception: what the work raises.
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
