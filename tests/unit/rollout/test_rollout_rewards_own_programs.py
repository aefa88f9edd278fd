"""Rewards alone in programs of somebody else: threads, daemons, standard input, odd settings."""

import asyncio
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cosmos_rollout import (
    ExactReward,
    Failure,
    PythonReward,
    RewardCodeError,
    RewardInput,
    RewardPool,
    RewardPoolConfig,
    Scored,
    WrongLoopError,
)

RIGHT = RewardInput(prompt="", response="4", answer="4")
SCRIPT = """
import asyncio
import multiprocessing
from cosmos_rollout import RewardError, RewardInput, RewardPoolConfig

async def main():
    pool = RewardPoolConfig().build()
    try:
        await pool.start()
    finally:
        await pool.aclose()

def ask(_):
    try:
        asyncio.run(main())
    except RewardError as error:
        return str(error)

"""


def run(code: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, *arguments],
        input=code,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return done.stdout + done.stderr


async def scored(pool: RewardPool, sample: RewardInput = RIGHT):
    async with asyncio.timeout(60):
        return await pool.score(sample)


def test_one_loop_after_the_other_may_use_a_pool():
    pool = RewardPoolConfig().build()
    for _ in range(2):
        assert isinstance(asyncio.run(scored(pool)), Scored)
    asyncio.run(pool.aclose())


async def test_threads_with_loops_of_their_own_are_refused_and_shown_the_way():
    pool = RewardPoolConfig().build()
    await scored(pool)
    loop = asyncio.get_running_loop()

    def of_its_own() -> None:
        asyncio.run(scored(pool))

    def of_the_pool() -> object:
        return asyncio.run_coroutine_threadsafe(pool.score(RIGHT), loop).result(60)

    with pytest.raises(WrongLoopError, match="run_coroutine_threadsafe"):
        await asyncio.to_thread(of_its_own)
    with ThreadPoolExecutor(4) as threads:
        asked = [loop.run_in_executor(threads, of_the_pool) for _ in range(20)]
        assert all(isinstance(outcome, Scored) for outcome in await asyncio.gather(*asked))
    await pool.aclose()


def test_a_daemon_is_told_that_it_may_have_no_workers(tmp_path: Path):
    main = """
if __name__ == "__main__":
    with multiprocessing.Pool(1) as workers:
        print(workers.map(ask, [0])[0])
"""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT + main)
    assert "use concurrent.futures.ProcessPoolExecutor, or daemon=False" in run("", str(script))


def test_a_script_of_standard_input_is_told_to_become_a_file():
    assert "<stdin> is no file" in run(SCRIPT + "print(ask(0))", "-")


def nested() -> object:
    """Deeper than may be gone, however deep that is by now."""
    inner: object = 1
    for _ in range(sys.getrecursionlimit()):
        inner = [inner]
    return inner


class Unlike:
    """Arrives nowhere: reading it raises."""

    def __reduce__(self):
        return int, ("no number",)


@pytest.mark.parametrize(
    "make",
    [lambda: lambda text: True, nested, Unlike],
    ids=["nameless", "too deep", "unreadable"],
)
async def test_what_cannot_be_pickled_costs_its_own_sample_alone(make: Callable[[], object]):
    pool = RewardPoolConfig().build()
    odd = RewardInput(prompt="", response="4", answer="4", fields={"check": make()})
    outcomes = await asyncio.gather(*(scored(pool, one) for one in [RIGHT, odd, RIGHT, RIGHT]))
    assert [isinstance(outcome, Scored) for outcome in outcomes] == [True, False, True, True]
    assert isinstance(outcomes[1], Failure)
    assert outcomes[1].error == "PicklingError"
    await pool.aclose()


async def test_an_async_reward_is_refused_before_the_first_sample(tmp_path: Path):
    file = tmp_path / "mine.py"
    file.write_text("async def asked(sample):\n    return 1.0\n")
    pool = RewardPoolConfig(rewards=(PythonReward(function=f"{file}:asked"),)).build()
    with pytest.raises(RewardCodeError, match="is an async function"):
        await pool.start()
    await pool.aclose()


def test_a_function_itself_is_no_setting_and_the_error_says_what_is():
    with pytest.raises(ValueError, match=r"a text, module:function or path/file\.py:function"):
        PythonReward(function=len)
    with pytest.raises(ValueError, match="PythonReward"):
        RewardPoolConfig(rewards=(ExactReward(), len))
