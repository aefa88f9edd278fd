"""Processes of a pool of rewards that hang: each is replaced, and costs no more than its sample."""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from processes import is_alive, parent_of

from cosmos_rollout import (
    Failure,
    PythonReward,
    RewardError,
    RewardInput,
    RewardPool,
    RewardPoolConfig,
    Scored,
)

TIMEOUT_S = 2.0
REWARD = """
import os, time
from pathlib import Path

def judge(sample):
    if sample.response:
        Path(sample.response).write_text(str(os.getpid()))
        time.sleep(sample.fields["for_s"])
    return float(os.getpid())
"""
pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]


async def opened(folder: Path, **settings: float) -> AsyncIterator[RewardPool]:
    (folder / "mine.py").write_text(REWARD)
    reward = PythonReward(function=f"{folder}/mine.py:judge", name="judge")
    pool = RewardPoolConfig(rewards=(reward,), memory_mib=1024, **settings).build()
    await pool.start()
    yield pool
    await pool.aclose()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool(tmp_path_factory) -> AsyncIterator[RewardPool]:
    async for pool in opened(tmp_path_factory.mktemp("one"), timeout_s=TIMEOUT_S):
        yield pool


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair(tmp_path_factory) -> AsyncIterator[RewardPool]:
    async for pool in opened(tmp_path_factory.mktemp("two"), timeout_s=30.0, num_workers=2):
        yield pool


def sample(busy: Path | None = None, for_s: float = 0.0) -> RewardInput:
    """One that keeps a worker busy, which leaves its process id in a file, or one that is quick."""
    return RewardInput(prompt="p", response=str(busy or ""), fields={"for_s": for_s})


async def worker_of(pool: RewardPool) -> int:
    """Return the worker that has judged a sample."""
    outcome = await pool.score(sample())
    assert isinstance(outcome, Scored), outcome
    return int(outcome.total)


def pid_in(file: Path) -> int:
    while not (file.exists() and file.read_text()):
        time.sleep(0.01)
    return int(file.read_text())


async def until_dead(pid: int) -> None:
    async with asyncio.timeout(20):
        while is_alive(pid):  # noqa: ASYNC110, it is the kernel that has to see it
            await asyncio.sleep(0.05)


@pytest.mark.parametrize("victims", [("worker",), ("server", "worker"), ("server",)])
async def test_who_hangs_with_nothing_to_do_is_replaced_and_costs_no_sample(
    pool: RewardPool, victims: tuple[str, ...]
) -> None:
    worker = await worker_of(pool)
    server = parent_of(worker)
    for victim in victims:
        os.kill(server if victim == "server" else worker, signal.SIGSTOP)
    if "worker" not in victims:
        os.kill(worker, signal.SIGKILL)  # another has to be started
    async with asyncio.timeout(40):
        assert await worker_of(pool) != worker
    assert pool.failures == {}
    await until_dead(worker)
    if "server" in victims:
        await until_dead(server)


async def test_one_that_hangs_over_a_sample_costs_that_sample(
    pool: RewardPool, tmp_path: Path
) -> None:
    scoring = asyncio.create_task(pool.score(sample(tmp_path / "pid", for_s=0.5)))
    os.kill(worker := await asyncio.to_thread(pid_in, tmp_path / "pid"), signal.SIGSTOP)
    outcome = await asyncio.wait_for(scoring, 20)
    assert isinstance(outcome, Failure)
    assert outcome.message == f"no result within {TIMEOUT_S} s"
    assert not is_alive(worker)
    assert await worker_of(pool) != worker
    assert pool.failures == {"judge: TimeoutError": 1}


async def test_one_of_two_that_hangs_is_replaced_while_the_other_goes_on(
    pair: RewardPool, tmp_path: Path
) -> None:
    files = [tmp_path / "first", tmp_path / "second"]
    await asyncio.gather(*(pair.score(sample(file, for_s=0.5)) for file in files))
    workers = {int(file.read_text()) for file in files}
    assert len(workers) == 2
    slow = asyncio.create_task(pair.score(sample(tmp_path / "slow", for_s=12.0)))
    busy = await asyncio.to_thread(pid_in, tmp_path / "slow")
    (hung,) = workers - {busy}
    os.kill(hung, signal.SIGSTOP)
    assert await asyncio.wait_for(worker_of(pair), 11) not in workers
    assert not slow.done()
    assert await slow == Scored(rewards={"judge": busy}, total=busy)
    assert pair.failures == {}
    await until_dead(hung)


async def test_a_pool_is_closed_while_all_of_its_processes_hang(tmp_path: Path) -> None:
    async for pool in opened(tmp_path, timeout_s=TIMEOUT_S):
        worker = await worker_of(pool)
        server = parent_of(worker)
        for pid in (server, worker):
            os.kill(pid, signal.SIGSTOP)
        await asyncio.wait_for(pool.aclose(), 20)
        await until_dead(worker)
        await until_dead(server)


async def test_a_reward_that_takes_too_long_to_import_is_refused_and_named(tmp_path):
    """As one that loads a model from storage that does not answer."""
    (tmp_path / "mine.py").write_text("import time\ntime.sleep(3600)\n" + REWARD)
    reward = PythonReward(function=f"{tmp_path}/mine.py:judge", name="judge")
    pool = RewardPoolConfig(rewards=(reward,), start_timeout_s=5.0, num_workers=1).build()
    began_s = time.monotonic()
    with pytest.raises(RewardError, match=r"reward judge cannot be used: importing it took more"):
        await pool.start()
    assert time.monotonic() - began_s < 30.0
    await pool.aclose()
