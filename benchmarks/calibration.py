"""Real transfers between processes of this machine, and links fitted to them for the simulator.

One sender process and up to four receiver processes, all at once from the sender or in a chain,
models of several sizes in few or many pieces. Some runs are fitted, the others are held out and
show how far the simulator is off.
"""

import functools
import json
import math
import multiprocessing
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from cosmos_weightsync import (
    Box,
    Layout,
    Link,
    Links,
    ShardSpec,
    Topology,
    TransferPlan,
    plan_transfer,
    simulate,
)

TRANSPORTS = ("shared_memory", "cross_memory", "tcp", "process_group", "nixl")
BUCKET_BYTES = 4 << 20
CHUNK_BYTES = BUCKET_BYTES // 2
"""Two messages share a bucket, so this is what a relay is behind."""
MOST_RECEIVERS = 4
START = {"bytes_per_s": 3e9, "stream": 2e9, "host_total": 4e9, "latency_s": 3e-3, "piece_s": 5e-5}


@dataclass(frozen=True, slots=True)
class Run:
    """One kind of transfer; ``fitted`` or held out."""

    mib: int
    num_tensors: int
    num_receivers: int
    chained: bool
    fitted: bool

    @property
    def title(self) -> str:
        """Of its row."""
        how = "in a chain" if self.chained else "direct"
        return f"{self.mib} MiB in {self.num_tensors}, to {self.num_receivers} {how}"

    def specs(self) -> list[ShardSpec]:
        """The model: equal matrices of float32."""
        box = Box.full(((self.mib << 20) // self.num_tensors // 4 // 256, 256))
        return [ShardSpec(f"w{i}", box.stop, box, "float32") for i in range(self.num_tensors)]

    def simulated_s(self, links: Links) -> float:
        """What the simulator says, for all processes on one host."""
        here = Topology.this_host(1, self.num_receivers, links=links)
        return simulate(replace(plan_of(self), topology=here)).seconds


@functools.cache
def plan_of(run: Run) -> TransferPlan:
    """Direct, or a chain, as between hosts that are far apart; it does not depend on the links."""
    side = [run.specs()]
    sides = Layout.from_ranks(side), Layout.from_ranks(side * run.num_receivers)
    far = Topology.uniform(1, run.num_receivers, gpus_per_host=1)
    far = replace(far, chunk_bytes=1, relays="auto" if run.chained else "never")
    return replace(plan_transfer(*sides, far), chunk_bytes=CHUNK_BYTES)


RUNS = (
    Run(8, 4, 1, False, True),
    Run(128, 32, 1, False, True),
    Run(128, 32, 4, False, True),
    Run(32, 2048, 1, False, True),
    Run(128, 32, 3, True, True),
    Run(32, 8, 1, False, False),
    Run(64, 16, 2, False, True),
    Run(128, 32, 3, False, False),
    Run(16, 1024, 2, False, False),
    Run(64, 16, 2, True, False),
    Run(128, 32, 4, True, False),
)
ONE_SIDED = ("shared_memory", "cross_memory")


def transports_here() -> list[str]:
    """All of `TRANSPORTS`, without NIXL where it is not installed."""
    from cosmos_weightsync.transports import NixlTransport  # with torch, which planning is without

    return [name for name in TRANSPORTS if name != "nixl" or NixlTransport.is_installed()]


def runs_of(transport: str) -> list[Run]:
    """Receivers pass on by messages; over transports that read memory they would wait for all."""
    return [run for run in RUNS if not (run.chained and transport in ONE_SIDED)]


def send(pipe: Connection) -> None:
    """The sending process: publishes models as told."""
    import torch

    from cosmos_weightsync import SenderConfig, WeightSender, shards_of

    torch.set_num_threads(1)
    while (command := pipe.recv()) is not None:
        num_tensors, rows = command
        tensors = [(f"w{i}", torch.ones(rows, 256)) for i in range(num_tensors)]
        config = SenderConfig(bucket_bytes=BUCKET_BYTES)
        with WeightSender(shards_of(tensors), config=config) as sender:
            pipe.send(sender.endpoint)
            while (version := pipe.recv()) is not None:
                sender.publish(version)
                pipe.send(version)
        pipe.send(None)


def receive(pipe: Connection) -> None:
    """A receiving process: stages versions as told, and says when each was there."""
    import torch

    from cosmos_weightsync import ReceiverConfig, WeightReceiver

    torch.set_num_threads(1)
    while (command := pipe.recv()) is not None:
        endpoint, transport = command
        config = ReceiverConfig(
            transport=transport,
            bucket_bytes=BUCKET_BYTES,
            serve_host="127.0.0.1",
            num_threads=1,
            linger_s=30.0,
        )
        with WeightReceiver([endpoint], config=config) as receiver:
            pipe.send(receiver.endpoint)
            while (version := pipe.recv()) is not None:
                receiver.stage(version, timeout_s=120)
                pipe.send(time.monotonic())
        pipe.send(None)


class Machine:
    """The processes."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes = []
        for target in (send, *[receive] * MOST_RECEIVERS):
            ours, theirs = context.Pipe()
            process = context.Process(target=target, args=(theirs,), daemon=True)
            process.start()
            self._pipes.append(ours)
            self._processes.append(process)

    def seconds(self, run: Run, transport: str, rounds: int) -> float:
        """The best of some rounds, after one that warms up; from the request to the last end."""
        sender, receivers = self._pipes[0], self._pipes[1 : 1 + run.num_receivers]
        shape = run.specs()[0].global_shape
        sender.send((run.num_tensors, shape[0]))
        endpoint = sender.recv()
        for pipe in receivers:
            pipe.send((endpoint, transport))
            mine = pipe.recv()
            endpoint = mine if run.chained else endpoint
        times = []
        for version in range(1, rounds + 2):
            sender.send(version)
            sender.recv()
            started = time.monotonic()
            for pipe in receivers:
                pipe.send(version)
            times.append(max(pipe.recv() for pipe in receivers) - started)
        for pipe in (*reversed(receivers), sender):
            pipe.send(None)
            pipe.recv()
        return min(times[1:])

    def close(self) -> None:
        """End all of them."""
        for process in self._processes:
            process.kill()
            process.join()


def links_of(values: dict[str, float]) -> Links:
    """All kinds of link alike, since all of them are this machine."""
    link = Link(
        values["bytes_per_s"],
        values["latency_s"],
        values["piece_s"],
        min(values["stream"], values["bytes_per_s"]),
    )
    total = values["host_total"]
    return Links(device=link, host=link, rail=link, network=link, host_total_bytes_per_s=total)


def fit(measured: Sequence[tuple[Run, float]]) -> dict[str, float]:
    """The links that come closest, by the squares of the logarithms of the ratios.

    Levenberg and Marquardt's method on the logarithms of the values, from several starts: which
    limit binds in which run is not known beforehand.
    """

    def misses(logs: np.ndarray) -> np.ndarray:
        links = links_of(dict(zip(START, np.exp(logs).tolist(), strict=True)))
        return np.array([math.log(run.simulated_s(links) / seconds) for run, seconds in measured])

    found: list[tuple[float, np.ndarray]] = []
    for stream, total in ((0.6, 1.0), (1.5, 1.0), (1.0, 0.4)):
        scale = np.array([1.0, stream, total, 1.0, 1.0])
        found.append(_descend(misses, np.log(np.array(list(START.values())) * scale)))
    best = min(found, key=lambda item: item[0])[1]
    return dict(zip(START, np.exp(best).tolist(), strict=True))


def _descend(
    misses: Callable[[np.ndarray], np.ndarray], logs: np.ndarray
) -> tuple[float, np.ndarray]:
    """The least sum of squares near a start, and where it is."""
    damping, now = 1e-2, misses(logs)
    for _ in range(15):
        slopes = (
            np.stack([misses(logs + 0.02 * axis) - now for axis in np.eye(len(logs))], 1) / 0.02
        )
        step = np.linalg.solve(
            slopes.T @ slopes + damping * np.eye(len(logs)), -slopes.T @ now
        ).clip(-1.0, 1.0)
        after = misses(logs + step)
        if (after**2).sum() < (now**2).sum():
            logs, now, damping = logs + step, after, damping / 4
        else:
            damping *= 8
        if damping > 1e6:
            break
    return float((now**2).sum()), logs


def calibrate(out: Path | None, rounds: int, transports: Iterable[str]) -> list[dict[str, Any]]:
    """Measure, fit and compare; writes a topology file for each transport into ``out``."""
    rows: list[dict[str, Any]] = []
    machine = Machine()
    try:
        for transport in transports:
            measured = [
                (run, machine.seconds(run, transport, rounds)) for run in runs_of(transport)
            ]
            values = fit([item for item in measured if item[0].fitted])
            links = links_of(values)
            if out is not None:
                out.mkdir(parents=True, exist_ok=True)
                content = {"links": links.to_json(), "chunk_bytes": CHUNK_BYTES}
                path = out / f"links-{transport}.json"
                path.write_text(json.dumps(content, indent=2) + "\n")
            rows += [
                {
                    "transport": transport,
                    "run": run.title,
                    "fitted": run.fitted,
                    "measured_s": seconds,
                    "simulated_s": run.simulated_s(links),
                    "links": values,
                }
                for run, seconds in measured
            ]
    finally:
        machine.close()
    return rows


def tables(rows: Sequence[dict[str, Any]]) -> str:
    """The fitted links, then every run with what the simulator says of it."""
    lines = [
        "| transport | GB/s a process | one stream | whole host | latency ms | a piece us "
        "| median error, held out | worst |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for transport in dict.fromkeys(row["transport"] for row in rows):
        mine = [row for row in rows if row["transport"] == transport]
        links = mine[0]["links"]
        stream = min(links["stream"], links["bytes_per_s"])
        errors = sorted(error_of(row) for row in mine if not row["fitted"])
        lines.append(
            f"| {transport} | {links['bytes_per_s'] / 1e9:.2f} | {stream / 1e9:.2f} | "
            f"{links['host_total'] / 1e9:.2f} | {links['latency_s'] * 1e3:.2f} | "
            f"{links['piece_s'] * 1e6:.1f} | {errors[len(errors) // 2]:.0%} | {errors[-1]:.0%} |"
        )
    lines += [
        "",
        "| transport | run | | measured s | simulated s | error |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row['transport']} | {row['run']} | {'fitted' if row['fitted'] else 'held out'} | "
        f"{row['measured_s']:.4f} | {row['simulated_s']:.4f} | {error_of(row):.0%} |"
        for row in rows
    ]
    return "\n".join(lines)


def error_of(row: dict[str, Any]) -> float:
    """The factor between measured and simulated, less one."""
    ratio = row["simulated_s"] / row["measured_s"]
    return max(ratio, 1 / ratio) - 1
