"""Engines that share a GPU: each takes its part of the memory, and they start one after another.

An engine measures, while it starts, how much memory the GPU has left for keys and values. What
others take meanwhile counts as its own use, so that two that start together leave nothing.
"""

import asyncio
import contextlib
import fcntl
import logging
import time
from collections.abc import AsyncGenerator
from dataclasses import replace
from pathlib import Path
from typing import IO, TypeVar

from cosmos_app.roles.turns import try_lock
from cosmos_rollout import GPU_MEMORY_SHARE, EngineConfig, SGLangConfig, VLLMConfig

EngineT = TypeVar("EngineT", bound=EngineConfig)

STARTING = "engine-starting.lock"
_LONGEST_TURN_S = 600.0
_LOOK_S = 0.2


def engine_that_shares(engine: EngineT, sharers: int) -> EngineT:
    """Return an engine that takes an equal part of the GPU's memory; a share that is set stays.

    So does a cache of vLLM's that has a size: such an engine measures no memory.
    """
    if sharers > 1 and isinstance(engine, VLLMConfig):
        is_set = engine.gpu_memory_share or engine.kv_cache_mib
        return engine if is_set else replace(engine, gpu_memory_share=GPU_MEMORY_SHARE / sharers)
    if sharers > 1 and isinstance(engine, SGLangConfig) and not engine.memory_share:
        return replace(engine, memory_share=GPU_MEMORY_SHARE / sharers)
    return engine


@contextlib.asynccontextmanager
async def start_turn(
    lock: Path, sharers: int, longest_s: float = _LONGEST_TURN_S
) -> AsyncGenerator[None]:
    """Hold the turn to start an engine; nobody waits where nobody shares.

    Args:
        lock: a file of those that share; it is made.
        sharers: processes on this one's GPU.
        longest_s: seconds after which an engine starts without its turn, and says so.
    """
    if sharers < 2:
        yield
        return
    with lock.open("ab") as held:
        if not await _is_mine(held, longest_s):
            logging.getLogger(__name__).warning(
                "another engine on this GPU is not started after %.0f s; starting beside it",
                longest_s,
            )
        try:
            yield
        finally:  # also for an engine's process that was forked meanwhile and holds the same file
            fcntl.flock(held, fcntl.LOCK_UN)


async def _is_mine(file: IO[bytes], longest_s: float) -> bool:
    ends_at = time.monotonic() + longest_s
    while time.monotonic() < ends_at:
        if try_lock(file, fcntl.LOCK_EX):
            return True
        await asyncio.sleep(_LOOK_S)
    return False
