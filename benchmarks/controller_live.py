"""A real controller, a real Redis and a thousand replicas with connections of their own.

    python benchmarks/controller.py --live 1000 [--seconds 20] [--json out.json]

Redis and the controller are processes, and two more hold half of the replicas each. Every replica
has a connection of its own, by which it reports and waits for commands. It has one slot and takes
some time over a group (exponential, 2 s on average), stores it, reports it and is given the next
one. The latency is from the report to that command, as the replica sees it: Redis, the controller's
turn, its commit, Redis. A policy takes every step at once, so that all replicas load a version
every few seconds. It ends with an error if a replica has no connection or was lost, or if the
controller's books do not balance.
"""

import argparse
import asyncio
import itertools
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from cosmos_core.bus import Bus, ControllerHost, RedisServer, ReplicaChannel
from cosmos_core.control import ControllerConfig, StalenessConfig
from cosmos_core.messages import (
    Generate,
    GroupFinished,
    LoadVersion,
    ReplicaJoined,
    SampleRef,
    StepFinished,
    Train,
    VersionLoaded,
    VersionPublished,
)

_NAMESPACE = "live"
_NUM_PROCESSES = 2
_WARM_UP_S = 5.0
_PAYLOAD = b"x" * 400


@dataclass(frozen=True, kw_only=True, slots=True)
class Live:
    """What was measured.

    Attributes:
        replicas: with a connection each.
        connections: that Redis counted.
        groups_per_s: finished and reported.
        p50_ms: from the report of a group to the next command, median.
        p99_ms: the same, 99 of 100 are quicker.
        longest_ms: the same, the slowest.
        steps: that the policy took.
        controller_mib: resident memory of the controller's process.
        controller_share: of one core that it used.
        redis_mib: memory that Redis says it uses.
        redis_share: of one core that it used.
    """

    replicas: int
    connections: int
    groups_per_s: float
    p50_ms: float
    p99_ms: float
    longest_ms: float
    steps: int
    controller_mib: float
    controller_share: float
    redis_mib: float
    redis_share: float


class NotWholeError(Exception):
    """Raised when what was measured is not what it says it is: a replica is missing, or a group."""


def require_whole(num_replicas: int, connections: int, status: Mapping[str, Any]) -> None:
    """Look whether all replicas were there, and each group is accounted for.

    Args:
        num_replicas: that were started.
        connections: that Redis counted, the controller's and the policy's among them.
        status: of the controller, while all of them work.

    Raises:
        NotWholeError: with the figures.
    """
    books, counters = status["books"], status["counters"]
    known = status["num_replicas"] - 1  # but for the policy
    if connections < num_replicas + 2 or known != num_replicas:
        raise NotWholeError(
            f"{num_replicas} replicas were started; Redis has {connections} connections, and the "
            f"controller knows {known}"
        )
    if counters["replicas_lost"] or counters["retries"] or books["dropped"]:
        raise NotWholeError(f"nothing was to be lost or tried again: {counters}, {books}")
    in_flight = sum(books["in_flight"].values())
    trained = status["step"] * config_for(num_replicas).groups_per_step
    if books["issued"] != books["consumed"] + in_flight or books["consumed"] != trained:
        raise NotWholeError(f"{trained} groups were trained on, and the books say {books}")
    if not trained:
        raise NotWholeError(f"no step was taken: {status.get('waiting_for')}")


def config_for(num_replicas: int) -> ControllerConfig:
    """Return a run that never runs out of prompts."""
    return ControllerConfig(
        num_steps=1_000_000,
        groups_per_step=num_replicas,
        samples_per_group=1,
        min_group_samples=1,
        staleness=StalenessConfig(depth=50, bound=1_000_000),
        lease_s=300.0,
    )


class Rollout:
    """One replica: its connection, and how long it waited for commands."""

    def __init__(self, name: str, group_s: float) -> None:
        self.latencies_s: list[float] = []
        self._name = name
        self._group_s = group_s
        self._version = 0
        self._rng = random.Random(name)

    async def run(self, url: str) -> None:
        """Answer commands until cancelled."""
        async with await Bus.connect(url, _NAMESPACE, connect_s=60.0) as bus:
            joined = ReplicaJoined(replica=self._name, role="rollout", slots=1)
            async with bus.join(joined) as channel:
                reported_s = 0.0
                async for command in channel.commands():
                    if isinstance(command, Generate):
                        if reported_s:
                            self.latencies_s.append(time.monotonic() - reported_s)
                        await asyncio.sleep(self._rng.expovariate(1 / self._group_s))
                        await self._store(bus, command)
                        reported_s = time.monotonic()
                        await channel.send(self._finished(command))
                    elif isinstance(command, LoadVersion):
                        await self._load(channel, command)

    async def _load(self, channel: ReplicaChannel, command: LoadVersion) -> None:
        self._version = command.version
        await channel.send(
            VersionLoaded(replica=self._name, version=command.version, transfer_s=0.0, stall_s=0.0)
        )

    async def _store(self, bus: Bus, command: Generate) -> None:
        await bus.put_payloads({f"{command.group}.{command.attempt}": _PAYLOAD})

    def _finished(self, command: Generate) -> GroupFinished:
        sample = SampleRef(
            sibling=0,
            status="completed",
            key=f"{command.group}.{command.attempt}",
            num_tokens=100,
            oldest_version=self._version,
            newest_version=self._version,
        )
        return GroupFinished(
            replica=self._name, group=command.group, attempt=command.attempt, samples=(sample,)
        )


async def play_rollouts(url: str, first: int, count: int, seconds: float) -> list[float]:
    """Play a share of the replicas; return their latencies after the warm-up."""
    rollouts = [Rollout(f"rollout-{first + index}", 2.0) for index in range(count)]
    tasks = [asyncio.create_task(rollout.run(url)) for rollout in rollouts]
    await asyncio.sleep(_WARM_UP_S)
    before = [len(rollout.latencies_s) for rollout in rollouts]
    await asyncio.sleep(seconds)
    found = [r.latencies_s[b:] for r, b in zip(rollouts, before, strict=True)]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return [each for latencies in found for each in latencies]


async def play_policy(bus: Bus, steps: list[int]) -> None:
    """Take every step at once."""
    joined = ReplicaJoined(replica="policy-0", role="policy", endpoints=("here",))
    async with bus.join(joined) as channel:
        async for command in channel.commands():
            if isinstance(command, Train):
                steps.append(command.step)
                await channel.send(StepFinished(replica="policy-0", step=command.step))
                published = VersionPublished(replica="policy-0", version=command.step + 1)
                await channel.send(published)


async def control(url: str, num_replicas: int) -> None:
    """Be the controller."""
    async with await Bus.connect(url, _NAMESPACE) as bus:
        await ControllerHost(bus, config_for(num_replicas)).run()


def start(*arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, __file__, *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


async def measure(num_replicas: int, seconds: float, server: RedisServer) -> Live:
    """Run everything against a server and return what was measured."""
    controller = start("control", server.url, num_replicas)
    firsts = [num_replicas * index // _NUM_PROCESSES for index in range(_NUM_PROCESSES + 1)]
    players = [
        start("rollouts", server.url, first, end - first, seconds)
        for first, end in itertools.pairwise(firsts)
    ]
    watched = [psutil.Process(controller.pid), psutil.Process(server.pid)]
    steps: list[int] = []
    try:
        async with await Bus.connect(server.url, _NAMESPACE) as bus:
            policy = asyncio.create_task(play_policy(bus, steps))
            await asyncio.sleep(_WARM_UP_S + 2.0)
            begun, used = time.monotonic(), [_cpu_s(process) for process in watched]
            await asyncio.sleep(0.8 * seconds)
            spent = time.monotonic() - begun
            shares = [(_cpu_s(p) - u) / spent for p, u in zip(watched, used, strict=True)]
            info: dict[str, Any] = await bus.call(lambda c: c.info())
            require_whole(num_replicas, info["connected_clients"], await bus.read_status())
            resident = watched[0].memory_info().rss
            said = [await asyncio.to_thread(p.communicate, timeout=seconds + 120) for p in players]
            policy.cancel()
            await asyncio.gather(policy, return_exceptions=True)
    finally:
        for process in [controller, *players]:
            process.kill()
            process.wait(timeout=60)
    latencies = sorted(1e3 * each for out, _ in said for each in json.loads(out))
    return Live(
        replicas=num_replicas,
        connections=info["connected_clients"],
        groups_per_s=len(latencies) / seconds,
        p50_ms=latencies[len(latencies) // 2],
        p99_ms=latencies[int(0.99 * len(latencies))],
        longest_ms=latencies[-1],
        steps=len(steps),
        controller_mib=resident / 2**20,
        controller_share=shares[0],
        redis_mib=info["used_memory"] / 2**20,
        redis_share=shares[1],
    )


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


def show_live(num_replicas: int, seconds: float, json_path: Path | None) -> None:
    """Measure and print a table of one line."""
    with tempfile.TemporaryDirectory() as folder:
        server = RedisServer.start(Path(folder) / "redis")
        try:
            live = asyncio.run(measure(num_replicas, seconds, server))
        finally:
            server.stop()
    print(
        "| replicas | connections | groups/s | p50 ms | p99 ms | longest ms "
        "| controller MiB, core | Redis MiB, core |\n|---|---|---|---|---|---|---|---|"
    )
    print(
        f"| {live.replicas} | {live.connections} | {live.groups_per_s:.0f} | {live.p50_ms:.1f} "
        f"| {live.p99_ms:.1f} | {live.longest_ms:.0f} "
        f"| {live.controller_mib:.0f}, {100 * live.controller_share:.0f} % "
        f"| {live.redis_mib:.0f}, {100 * live.redis_share:.0f} % |"
    )
    if json_path:
        json_path.write_text(json.dumps(asdict(live), indent=1))


def main() -> None:
    """Be one of the processes that `measure` starts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("role", choices=("control", "rollouts"))
    parser.add_argument("url")
    parser.add_argument("numbers", nargs="+", type=float)
    options = parser.parse_args()
    if options.role == "control":
        asyncio.run(control(options.url, int(options.numbers[0])))
    else:
        first, count, seconds = options.numbers
        print(json.dumps(asyncio.run(play_rollouts(options.url, int(first), int(count), seconds))))


if __name__ == "__main__":
    main()
