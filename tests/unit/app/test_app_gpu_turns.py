"""Engines on one GPU divide its memory and start one after another."""

import asyncio
import logging
import os
import signal
import subprocess
import sys
import time

import pytest

from cosmos_app.roles.gpu_turns import engine_that_shares, start_turn
from cosmos_rollout import ScriptedConfig, SGLangConfig, VLLMConfig


def test_engines_divide_the_memory_unless_it_is_divided_already():
    alone = VLLMConfig()
    assert alone.engine_arguments()["gpu_memory_utilization"] == 0.85
    assert engine_that_shares(alone, 1) == alone
    assert engine_that_shares(alone, 3).gpu_memory_share == pytest.approx(0.85 / 3)
    assert engine_that_shares(SGLangConfig(), 2).memory_share == pytest.approx(0.85 / 2)
    chosen = VLLMConfig(gpu_memory_share=0.4)
    assert engine_that_shares(chosen, 3) == chosen
    sized = VLLMConfig(kv_cache_mib=256)  # needs no memory to be free that it will not take
    assert engine_that_shares(sized, 3) == sized
    assert sized.engine_arguments()["gpu_memory_utilization"] == 0.01
    assert engine_that_shares(ScriptedConfig(), 3) == ScriptedConfig()


def test_one_starts_at_a_time_where_they_share(tmp_path):
    seen = []

    async def start(name, sharers):
        async with start_turn(tmp_path / "lock", sharers):
            seen.append(name)
            await asyncio.sleep(0.05)
            seen.append(name)

    async def start_all(sharers):
        await asyncio.gather(*(start(name, sharers) for name in "abc"))

    asyncio.run(start_all(3))
    assert seen[::2] == seen[1::2]
    seen.clear()
    asyncio.run(start_all(1))
    assert seen[:3] == ["a", "b", "c"]


_HOLDER = """
import asyncio, sys, time
from pathlib import Path
from cosmos_app.roles.gpu_turns import start_turn

async def hold():
    async with start_turn(Path(sys.argv[1]), 2):
        print("held", flush=True)
        time.sleep(600)

asyncio.run(hold())
"""


def test_a_turn_ends_with_its_process_and_is_not_waited_for_for_ever(tmp_path, caplog):
    async def take(longest_s):
        begun = time.monotonic()
        async with start_turn(tmp_path / "lock", 2, longest_s):
            return time.monotonic() - begun

    command = [sys.executable, "-c", _HOLDER, str(tmp_path / "lock")]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as holder:
        try:
            assert holder.stdout.readline() == b"held\n"
            with caplog.at_level(logging.WARNING):
                assert asyncio.run(take(0.3)) >= 0.3
            assert "another engine on this GPU is not started after 0 s" in caplog.text
        finally:
            os.kill(holder.pid, signal.SIGKILL)
        holder.wait(timeout=30)
        assert asyncio.run(take(60.0)) < 30.0
