"""Weight sync against per-parameter gather and broadcast, between processes of one host.

    python benchmarks/weightsync.py --mib 256 --receivers 1 --rounds 7

Two FSDP2 ranks hold a model in float32; receivers want all of it in bfloat16. In the same run, in
turns, the first turn not counted:

* each transport: `publish` on both ranks (cast and copy), then every receiver stages the version,
  checksums included;
* gather + broadcast: for each parameter `full_tensor()` on the trainer ranks, cast, gloo broadcast
  from rank 0 to the receivers, which is what most trainers do;
* memcpy: a receiver copies that many bytes from memory to memory: the one-copy bound.

A time is that of the slowest process. Extra memory is the peak resident size of a receiver after
its first transfer over its size before; it includes its copy of the model.
"""

import argparse
import json
import queue
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from cosmos_weightsync import ReceiverConfig, SenderConfig, WeightReceiver, WeightSender, shards_of

NUM_SENDERS = 2
TRANSPORTS = ("shared_memory", "tcp", "process_group")
BASELINE = "gather + broadcast"
WIDTH = 1024
LAYER = ((3 * WIDTH, WIDTH), (WIDTH, WIDTH), (4 * WIDTH, WIDTH), (WIDTH, 4 * WIDTH), (WIDTH,))


class Stack(nn.Module):
    """Layers of transformer-like shapes, 24 MiB each in bfloat16."""

    def __init__(self, mib: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ParameterList(torch.randn(shape) for shape in LAYER)
            for _ in range(max(1, mib // 24))
        )


class Turn:
    """Runs a piece of work on all processes at once and takes the time of the slowest."""

    def __init__(self, results: Any, rank: int) -> None:
        self._results = results
        self._reports = rank == 0

    def __call__(self, name: str, work: Callable[[], object]) -> None:
        dist.barrier()
        started, cpu_started = time.monotonic(), time.process_time()
        work()
        slowest = torch.tensor(time.monotonic() - started, dtype=torch.float64)
        cpu = torch.tensor(time.process_time() - cpu_started, dtype=torch.float64)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        dist.all_reduce(cpu)
        if self._reports:
            self._results.put((name, slowest.item(), cpu.item()))


def peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def current_mib() -> float:
    resident_pages = int(Path("/proc/self/statm").read_text().split()[1])
    return resident_pages * resource.getpagesize() / (1 << 20)


def process(rank: int, options: argparse.Namespace, store: str, results: Any) -> None:
    torch.set_num_threads(1)
    world = NUM_SENDERS + options.receivers
    dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=world)
    mesh = DeviceMesh("cpu", list(range(NUM_SENDERS)), mesh_dim_names=("dp",))
    group = dist.new_group([0, *range(NUM_SENDERS, world)])
    turn = Turn(results, rank)
    if rank < NUM_SENDERS:
        send(turn, options, mesh, group)
    else:
        receive(turn, options, group, results)
    dist.barrier()
    dist.destroy_process_group()


def send(turn: Turn, options: argparse.Namespace, mesh: DeviceMesh, group: Any) -> None:
    model = Stack(options.mib)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    rank = dist.get_rank()
    config = SenderConfig(wire_dtype="bfloat16")
    sender = WeightSender(shards_of(model), rank=rank, num_ranks=NUM_SENDERS, config=config)
    endpoints: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(endpoints, sender.endpoint)

    def gather_and_broadcast() -> None:
        for parameter in model.parameters():
            full = parameter.full_tensor().detach().bfloat16()
            if rank == 0:
                dist.broadcast(full, 0, group=group)

    version = 0
    for _ in range(options.rounds + 1):
        for name in TRANSPORTS:
            version += 1
            turn(name, lambda v=version: sender.publish(v))
        turn(BASELINE, gather_and_broadcast)
        turn("memcpy", lambda: None)
    sender.close()


def receive(turn: Turn, options: argparse.Namespace, group: Any, results: Any) -> None:
    endpoints: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(endpoints, None)
    receivers = {
        name: WeightReceiver(endpoints[:NUM_SENDERS], config=ReceiverConfig(transport=name))
        for name in TRANSPORTS
    }
    with torch.device("meta"):
        shapes = [parameter.shape for parameter in Stack(options.mib).parameters()]
    targets = [torch.zeros(shape, dtype=torch.bfloat16) for shape in shapes]

    def take_broadcasts() -> None:
        for target in targets:
            dist.broadcast(target, 0, group=group)

    def copy() -> None:
        for target, shard in zip(targets, receivers["tcp"].staged_shards(), strict=True):
            target.copy_(shard.tensor)

    version = 0
    for round_number in range(options.rounds + 1):
        for name, receiver in receivers.items():
            version += 1
            before = current_mib()
            turn(name, lambda r=receiver, v=version: r.stage(v))
            if round_number == 0 and dist.get_rank() == NUM_SENDERS:
                results.put(("memory " + name, peak_mib() - before, 0.0))
        turn(BASELINE, take_broadcasts)
        turn("memcpy", copy)
    for receiver in receivers.values():
        receiver.close()


def measure(options: argparse.Namespace) -> list[tuple[str, float, float]]:
    context = mp.get_context("spawn")
    results = context.Queue()
    world = NUM_SENDERS + options.receivers
    found: list[tuple[str, float, float]] = []
    with tempfile.TemporaryDirectory() as folder:
        arguments = (options, f"{folder}/store", results)
        running = mp.spawn(process, arguments, nprocs=world, join=False)
        while not running.join(timeout=0.2):
            drain(results, found)
        drain(results, found)
    return found


def drain(results: Any, found: list[tuple[str, float, float]]) -> None:
    while True:
        try:
            found.append(results.get(timeout=0.2))
        except queue.Empty:
            return


def summarise(options: argparse.Namespace, found: list[tuple[str, float, float]]) -> list[dict]:
    with torch.device("meta"):
        numel = sum(parameter.numel() for parameter in Stack(options.mib).parameters())
    gigabytes = 2 * numel * options.receivers / 1e9
    memory = {name.removeprefix("memory "): mib for name, mib, _ in found if "memory" in name}
    rows = []
    for name in ("memcpy", *TRANSPORTS, BASELINE):
        runs = [(seconds, cpu) for method, seconds, cpu in found if method == name][1:]
        seconds = [run[0] for run in runs]
        rows.append(
            {
                "method": name,
                "median_s": statistics.median(seconds),
                "best_s": min(seconds),
                "gb_per_s": gigabytes / statistics.median(seconds),
                "cpu_s_per_gb": statistics.median(run[1] for run in runs) / gigabytes,
                "receiver_mib": memory.get(name),
            }
        )
    baseline = rows[-1]
    for row in rows:
        row["times_faster"] = baseline["median_s"] / row["median_s"]
    return rows


def table(options: argparse.Namespace, rows: list[dict]) -> str:
    lines = [
        f"{options.mib} MiB in bfloat16, {NUM_SENDERS} FSDP2 ranks to {options.receivers} "
        f"receiver(s), {options.rounds} rounds",
        "",
        "| method | median s | best s | GB/s | CPU s per GB | extra MiB, receiver | x faster |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        memory = "" if row["receiver_mib"] is None else f"{row['receiver_mib']:.0f}"
        lines.append(
            f"| {row['method']} | {row['median_s']:.3f} | {row['best_s']:.3f} | "
            f"{row['gb_per_s']:.2f} | {row['cpu_s_per_gb']:.2f} | {memory} | "
            f"{row['times_faster']:.1f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--mib", type=int, default=240, help="model size in bfloat16")
    parser.add_argument("--receivers", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")
    options = parser.parse_args()
    rows = summarise(options, measure(options))
    print(json.dumps(rows, indent=2) if options.json else table(options, rows))


if __name__ == "__main__":
    main()
