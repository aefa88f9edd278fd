"""What runs on each of two machines: policy replica and controller on one, rollout on the other.

COSMOS_HOST=ADDRESS python machine_worker.py INDEX SHARED_DIRECTORY
"""

import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import pytest
import torch

from cosmos_app.roles.process import own_address, speak_from_own_address
from cosmos_core.bus import Bus, BusUnreachableError, ControllerHost, RedisServer
from cosmos_core.control import ControllerConfig
from cosmos_core.messages import Generate, ReplicaJoined
from cosmos_core.rundir import write_atomic
from cosmos_parallel import ReplicaMembership, StoreReplicaGroup, open_store
from cosmos_weightsync import (
    ReceiverConfig,
    SenderConfig,
    WeightReceiver,
    WeightSender,
    WeightSyncError,
    shards_of,
)

DEADLINE_S = 200.0
TOKEN = "a token of this test"
WEIGHT = torch.arange(1 << 18, dtype=torch.float32)


def appears(path: Path) -> Path:
    deadline = time.monotonic() + DEADLINE_S
    while not path.exists():
        assert time.monotonic() < deadline, f"{path.name} did not appear"
        time.sleep(0.1)
    return path


def sum_over_machines(store: Any, index: int) -> float:
    members = ReplicaMembership(names=("policy-0", "policy-1"), index=index, epoch=1)
    group = StoreReplicaGroup(store, members, timeout_s=DEADLINE_S)
    value = torch.tensor([1.0 + index])
    group.sum_([value])
    group.close()
    return float(value)


async def control(url: str, done: Path) -> None:
    config = ControllerConfig(num_steps=1, groups_per_step=1, samples_per_group=2)
    async with await Bus.connect(url, "machines") as bus:
        host = asyncio.create_task(ControllerHost(bus, config).run())
        await asyncio.to_thread(appears, done)
        host.cancel()
        await asyncio.gather(host, return_exceptions=True)


def head(shared: Path) -> None:
    server = RedisServer.start(shared / "redis", host=own_address())
    store = open_store(own_address(), 0, hosting=True, timeout_s=DEADLINE_S)
    config = SenderConfig(bind_host=own_address(), token=TOKEN)
    try:
        with WeightSender(shards_of([("weight", WEIGHT)]), config=config) as sender:
            sender.publish(1)
            where = {"redis": server.url, "store": store.port, "weights": sender.endpoint}
            write_atomic(shared / "addresses.json", json.dumps(where))
            assert sum_over_machines(store, 0) == 3.0
            asyncio.run(control(server.url, shared / "done"))
    finally:
        server.stop()


async def given_work(url: str) -> None:
    joined = ReplicaJoined(replica="rollout-0", role="rollout", slots=1)
    async with (
        asyncio.timeout(DEADLINE_S),
        await Bus.connect(url, "machines") as bus,
        bus.join(joined) as channel,
    ):
        assert isinstance(await anext(channel.commands()), Generate)


async def refused_without_password(url: str) -> None:
    parts = urlsplit(url)
    bare = urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))
    with pytest.raises(BusUnreachableError, match="refuses us"):
        await Bus.connect(bare, "machines", connect_s=2.0)


def staged(endpoint: str, token: str) -> torch.Tensor:
    config = ReceiverConfig(transport="tcp", token=token)
    with WeightReceiver([endpoint], config=config) as receiver:
        receiver.stage(1, timeout_s=30.0)
        (shard,) = receiver.staged_shards()
        return shard.tensor.clone()


def other(shared: Path) -> None:
    where = json.loads(appears(shared / "addresses.json").read_text())
    host = urlsplit(where["redis"]).hostname
    assert host != own_address()
    store = open_store(str(host), where["store"], hosting=False, timeout_s=DEADLINE_S)
    assert sum_over_machines(store, 1) == 3.0
    assert torch.equal(staged(where["weights"], TOKEN), WEIGHT)
    with pytest.raises(WeightSyncError):
        staged(where["weights"], "a wrong one")
    asyncio.run(refused_without_password(where["redis"]))
    asyncio.run(given_work(where["redis"]))
    (shared / "done").touch()


if __name__ == "__main__":
    speak_from_own_address()
    (head, other)[int(sys.argv[1])](Path(sys.argv[2]))
