"""A block that ends with an error when a task beside it does."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable


def as_it_is(error: BaseException) -> BaseException:
    """Have a block end with the task's own error."""
    return error


@contextlib.asynccontextmanager
async def ended_by(
    beside: asyncio.Task[None], as_told: Callable[[BaseException], BaseException] = as_it_is
) -> AsyncGenerator[None]:
    """Have the block end with an error when a task does that is to go on for as long.

    Args:
        beside: the task; it is cancelled with the block's end.
        as_told: returns what is raised for an error of the task's.
    """
    task = asyncio.current_task()
    assert task is not None
    has_failed = False

    def end(beside: asyncio.Task[None]) -> None:
        nonlocal has_failed
        if not beside.cancelled():
            has_failed = True
            task.cancel()

    beside.add_done_callback(end)
    try:
        yield
    except (Exception, asyncio.CancelledError):
        error = beside.exception() if has_failed else None
        if error is None:
            raise
        task.uncancel()
        told = as_told(error)  # what came meanwhile, as from a task within, came of that
        raise told from (None if told is error else error)
    finally:
        beside.remove_done_callback(end)
        beside.cancel()
        await asyncio.gather(beside, return_exceptions=True)
