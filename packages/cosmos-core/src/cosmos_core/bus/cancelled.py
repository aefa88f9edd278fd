"""Requests of redis-py that are cancelled stay cancelled."""

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

Answer = TypeVar("Answer")


async def cancellable(answer: Awaitable[Answer]) -> Answer:
    """Wait for an answer; a cancellation that redis-py takes for its own timeout still counts.

    Raises:
        asyncio.CancelledError: if the task was cancelled meanwhile, whatever redis-py made of it.
    """
    task = asyncio.current_task()
    before = task.cancelling() if task else 0
    found = await answer
    if task and task.cancelling() > before:
        raise asyncio.CancelledError
    return found
