"""Samples of requests that are tasks of one event loop."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Sequence

from cosmos_rollout.engine import GeneratedSample, GenerationRequest


async def samples_as_finished(
    requests: Sequence[GenerationRequest],
    sample: Callable[[GenerationRequest], Coroutine[object, object, GeneratedSample]],
    running: set[asyncio.Task[GeneratedSample]],
) -> AsyncGenerator[GeneratedSample, None]:
    """Start a task for each request and yield the samples as they finish.

    Whoever stops to listen cancels what is left.

    Args:
        requests: checked.
        sample: generates one.
        running: the engine's tasks, in which each is while it runs, named by its request.
    """
    finished: asyncio.Queue[asyncio.Task[GeneratedSample]] = asyncio.Queue()
    tasks = [asyncio.create_task(sample(one), name=one.request_id) for one in requests]
    for task in tasks:
        running.add(task)
        task.add_done_callback(running.discard)
        task.add_done_callback(finished.put_nowait)
    try:
        for _ in tasks:
            yield (await finished.get()).result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def names_of(running: Iterable[asyncio.Task[GeneratedSample]]) -> set[str]:
    """Return the ids of the requests that tasks of `samples_as_finished` generate."""
    return {task.get_name() for task in running}
