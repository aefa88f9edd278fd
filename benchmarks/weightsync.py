"""Weight sync against its bound and its peers, between processes of one host.

    python benchmarks/weightsync.py [--model mixture] [--mib 1970] [--rounds 2] [--arms memcpy,...]

Four FSDP2 ranks hold a model in bfloat16 (183 tensors at 1970 MiB, or, of a mixture that has a
tensor for each matrix of an expert, 1,754); two receivers want what the two
workers of a tensor-parallel engine hold. In each round every arm has its turn, in another order
every time: once to warm up, with its bytes checked, then ``--repeats`` times on the clock. Arms:

* one for each transport of this library: `publish` at all senders, then `stage` at all receivers,
  checksums included;
* memcpy: each receiver copies as many bytes as it wants from memory to memory. This is the bound
  that the others are held against, in the same round;
* per-parameter `full_tensor()` and broadcast over gloo, which is what most trainers do;
* torch.distributed.checkpoint through a RAM disk;
* NIXL and Mooncake's transfer engine used directly, where they load (`weightsync_peers`); they run
  in an environment of their own, made at the first use;
* torchstore (`weightsync_torchstore`), whose clients are processes of its own: its turns come
  before the rounds and, where there are two or more, once more after them.

``--without-peers`` leaves out the last three.

A time is that of the slowest process. CPU seconds are of all processes, per GB of model. Extra
memory is what the resident set of the hungriest sender and receiver grew by while they worked on a
later version; what is kept between versions (snapshots, staged weights) is not in it.
"""

import argparse
import json
import os
import queue
import random
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import xxhash
from measure import forget_peak, status_mib
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from trl_environment import python_with
from weightsync_arms import Arm, Place, own_arms
from weightsync_model import NUM_RECEIVERS, NUM_SENDERS, Size, Trained, wanted_specs
from weightsync_peers import MODULES, PEERS, peer_arms

import cosmos_weightsync
from cosmos_weightsync.transports import NixlTransport

TRANSPORTS = ("shared_memory", "cross_memory", "tcp", "process_group") + (
    ("nixl",) if NixlTransport.is_installed() else ()
)
WARM_TURNS = 4
"""A sender writes into two snapshots in turn, and lays both out once it knows what is asked for.
Each is to have been read as it is then.
"""
WORLD = NUM_SENDERS + NUM_RECEIVERS
HERE = Path(__file__).resolve().parent
SOURCE = Path(cosmos_weightsync.__file__).parents[1]
TORCHSTORE, TORCHSTORE_S = "torchstore", 900.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """One arm's turn on the clock.

    Attributes:
        arm: its name.
        round: the round.
        seconds: of the slowest process, by step.
        cpu_s: of all processes.
        sender_mib: growth of the hungriest sender's resident set.
        receiver_mib: of the hungriest receiver's.
    """

    arm: str
    round: int
    seconds: dict[str, float]
    cpu_s: float
    sender_mib: float
    receiver_mib: float

    @property
    def total_s(self) -> float:
        return sum(self.seconds.values())


def take_turn(arm: Arm, turn: int, round_number: int) -> Measured:
    """Run the arm's steps in all processes at once."""
    seconds: dict[str, float] = {}
    cpu = 0.0
    dist.barrier()
    before = forget_peak()
    for label, work in arm.steps(turn).items():
        dist.barrier()
        started, cpu_started = time.monotonic(), time.process_time()
        work()
        slowest = torch.tensor(time.monotonic() - started, dtype=torch.float64)
        dist.barrier()
        spent = torch.tensor(time.process_time() - cpu_started, dtype=torch.float64)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        dist.all_reduce(spent)
        seconds[label] = slowest.item()
        cpu += spent.item()
    grown = status_mib("VmHWM") - before
    is_sender = dist.get_rank() < NUM_SENDERS
    peaks = torch.tensor([grown if is_sender else 0.0, 0.0 if is_sender else grown])
    dist.all_reduce(peaks, dist.ReduceOp.MAX)
    sender_mib, receiver_mib = peaks.tolist()
    return Measured(
        arm=arm.name,
        round=round_number,
        seconds=seconds,
        cpu_s=cpu,
        sender_mib=sender_mib,
        receiver_mib=receiver_mib,
    )


def checksums(tensors: dict[str, Tensor]) -> dict[str, int]:
    return {
        name: xxhash.xxh3_64_intdigest(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
        for name, tensor in tensors.items()
    }


def check_bytes(arm: Arm, expected: dict[str, int]) -> None:
    """Hold what an arm brought against what the first one did."""
    found = arm.arrived()
    if found is None:
        return
    sums = checksums(found)
    expected = expected or sums
    wrong = sorted(name for name, value in sums.items() if expected[name] != value)
    if wrong:
        raise RuntimeError(f"{arm.name} brought other bytes for {wrong[:3]}")


def process(rank: int, options: argparse.Namespace, store: str, results: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=WORLD)
    place = make_place(options, rank)
    arms = [arm for arm in own_arms(place, TRANSPORTS) if wants(options, arm.name)]
    arms += peer_arms(place, options.peers)
    expected: dict[str, int] = {}
    generator = random.Random(0)
    for round_number in range(options.rounds):
        generator.shuffle(arms)
        for arm in arms:
            arm.prepare()
            for _ in range(WARM_TURNS):
                take_turn(arm, 0, round_number)
            found = arm.arrived()
            if found is not None and not expected:
                expected = checksums(found)
            check_bytes(arm, expected)
            for turn in range(1, options.repeats + 1):
                measured = take_turn(arm, turn, round_number)
                if rank == 0:
                    results.put(measured)
            arm.finish()
            dist.barrier()
    dist.barrier()
    dist.destroy_process_group()
    if options.peers:
        # NIXL and Mooncake each bring a libnl; a process that ends in order crashes in the two.
        results.close()
        results.join_thread()
        os._exit(0)


def wants(options: argparse.Namespace, name: str) -> bool:
    return not options.arms or name == "memcpy" or name in options.arms.split(",")


def find_peers(options: argparse.Namespace) -> list[str]:
    """The wanted peers that load; this process and its children find them from now on."""
    wanted = [name for name in PEERS if wants(options, name) and not options.without_peers]
    if not wanted:
        return []
    python = str(python_with("peers"))
    script = "import sysconfig; print(sysconfig.get_path('purelib'))"
    sys.path.append(subprocess.check_output([python, "-c", script], text=True).strip())
    found = []
    for name in wanted:
        done = subprocess.run(
            [python, "-c", f"import {MODULES[name]}"], capture_output=True, text=True
        )
        if done.returncode == 0:
            found.append(name)
        else:
            print(f"without {name}: {done.stderr.strip().splitlines()[-1]}", file=sys.stderr)
    return found


def runs_torchstore(options: argparse.Namespace) -> bool:
    return wants(options, TORCHSTORE) and not options.without_peers


def measure_torchstore(options: argparse.Namespace, round_number: int) -> list[Measured]:
    """Its turns in one round; none where it does not load."""
    command = [str(python_with("torchstore")), str(HERE / "weightsync_torchstore.py")]
    command += ["--model", options.model, "--mib", str(options.mib)]
    done = subprocess.run(
        [*command, "--repeats", str(options.repeats)],
        capture_output=True,
        text=True,
        timeout=TORCHSTORE_S,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), str(SOURCE)])},
    )
    if done.returncode != 0:
        last = (done.stderr.strip() or "no word").splitlines()[-1]
        print(f"without {TORCHSTORE}: {last}", file=sys.stderr)
        return []
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    return [Measured(arm=TORCHSTORE, round=round_number, **json.loads(line)) for line in lines]


def size_of(options: argparse.Namespace) -> Size:
    return Size(model=options.model, mib=options.mib)


def make_place(options: argparse.Namespace, rank: int) -> Place:
    senders = list(range(NUM_SENDERS))
    receivers = list(range(NUM_SENDERS, WORLD))
    meshes = [DeviceMesh("cpu", ranks, mesh_dim_names=("ranks",)) for ranks in (senders, receivers)]
    broadcast: Any = dist.new_group([0, *receivers])
    is_sender = rank < NUM_SENDERS
    size = size_of(options)
    model = Trained(size, meshes[0]) if is_sender else None
    flat = None
    if not is_sender:
        specs = wanted_specs(size, rank - NUM_SENDERS)
        flat = torch.zeros(sum(spec.box.numel for spec in specs), dtype=torch.bfloat16)
    return Place(
        size=size,
        rank=rank,
        senders=meshes[0].get_group() if is_sender else meshes[1].get_group(),
        receivers=meshes[0].get_group() if is_sender else meshes[1].get_group(),
        mesh=meshes[0] if is_sender else meshes[1],
        broadcast=broadcast,
        model=model,
        flat=flat,
    )


def measure(options: argparse.Namespace) -> list[Measured]:
    context = mp.get_context("spawn")
    results = context.Queue()
    found: list[Measured] = []
    with tempfile.TemporaryDirectory() as folder:
        arguments = (options, f"{folder}/store", results)
        running: Any = mp.spawn(process, arguments, nprocs=WORLD, join=False)
        while not running.join(timeout=0.2):
            drain(results, found)
        drain(results, found)
    return found


def drain(results: Any, found: list[Measured]) -> None:
    while True:
        try:
            found.append(results.get(timeout=0.2))
        except queue.Empty:
            return
        last = found[-1]
        print(f"round {last.round}: {last.arm} {last.total_s:.3f} s", file=sys.stderr)


def summarise(options: argparse.Namespace, found: list[Measured]) -> list[dict[str, Any]]:
    gigabytes = size_of(options).num_bytes() / 1e9
    bound = {
        number: statistics.median(
            m.total_s for m in found if (m.arm, m.round) == ("memcpy", number)
        )
        for number in range(options.rounds)
    }
    best_bound = min(m.total_s for m in found if m.arm == "memcpy")
    rows = []
    for name in dict.fromkeys(m.arm for m in found):
        runs = [m for m in found if m.arm == name]
        pulls = [m.seconds["pull"] for m in runs]
        rows.append(
            {
                "arm": name,
                "median_s": statistics.median(m.total_s for m in runs),
                "best_s": min(m.total_s for m in runs),
                "pull_median_s": statistics.median(pulls),
                "pull_best_s": min(pulls),
                "pull_bounds": statistics.median(m.seconds["pull"] / bound[m.round] for m in runs),
                "bounds": statistics.median(m.total_s / bound[m.round] for m in runs),
                "pull_best_bounds": min(pulls) / best_bound,
                "best_bounds": min(m.total_s for m in runs) / best_bound,
                "cpu_s_per_gb": statistics.median(m.cpu_s for m in runs) / gigabytes,
                "sender_mib": statistics.median(m.sender_mib for m in runs),
                "receiver_mib": statistics.median(m.receiver_mib for m in runs),
            }
        )
    return sorted(rows, key=lambda row: row["best_s"])


def table_row(row: dict[str, Any]) -> str:
    return (
        f"| {row['arm']} | {row['median_s']:.3f} / {row['best_s']:.3f} "
        f"| {row['bounds']:.1f} / {row['best_bounds']:.1f} "
        f"| {row['pull_median_s']:.3f} / {row['pull_best_s']:.3f} "
        f"| {row['pull_bounds']:.1f} / {row['pull_best_bounds']:.1f} "
        f"| {row['cpu_s_per_gb']:.2f} | {row['sender_mib']:.0f} | {row['receiver_mib']:.0f} |"
    )


def table(options: argparse.Namespace, rows: list[dict[str, Any]]) -> str:
    size = size_of(options)
    lines = [
        f"{size.model}, {size.num_bytes() / 1e9:.2f} GB in bfloat16, {len(size.shapes())} tensors, "
        f"{NUM_SENDERS} FSDP2 ranks to "
        f"{NUM_RECEIVERS} tensor-parallel ranks, {options.rounds} rounds of {options.repeats}. "
        "Seconds and times memcpy are median / best.",
        "",
        "| arm | publish + pull s | x memcpy | pull s | x memcpy | CPU s per GB | extra MiB, "
        "sender | receiver |",
        "|---|---|---|---|---|---|---|---|",
    ]
    lines += [table_row(row) for row in rows]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--mib", type=int, default=1970, help="model size in bfloat16")
    parser.add_argument("--model", choices=("dense", "mixture"), default="dense")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3, help="timed turns of an arm in a round")
    parser.add_argument("--arms", default="", help="only these, separated by commas, and memcpy")
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")
    parser.add_argument("--without-peers", action="store_true", help="only ours and torch's")
    options = parser.parse_args()
    options.peers = find_peers(options)
    apart: list[Measured] = []
    if runs_torchstore(options):
        apart += measure_torchstore(options, 0)
    found = measure(options)
    if runs_torchstore(options) and options.rounds > 1:
        apart += measure_torchstore(options, options.rounds - 1)
    rows = summarise(options, found + apart)
    print(json.dumps(rows, indent=2) if options.json else table(options, rows))


if __name__ == "__main__":
    main()
