"""A thread that has computed nothing, to start processes from."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


async def in_fresh_thread(work: Callable[[], T]) -> T:
    """Do it in a thread of its own, so that the loop stays free and forked processes can compute.

    The process that a thread forks has that thread alone. If it had OpenMP's helpers, as each does
    that has run an operation of torch in parallel, they are known there and gone: the first such
    operation of the new process waits for them for ever. Threads of `asyncio.to_thread` are used
    again, and may have had some.

    Raises:
        Exception: whatever the work raises.
    """
    pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="fresh")
    try:
        return await asyncio.get_running_loop().run_in_executor(pool, work)
    finally:
        pool.shutdown(wait=False)
