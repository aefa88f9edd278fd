"""The planner: how long it takes, and how near its plans come to what the network allows.

    python benchmarks/planner.py [--quick] [--json] [--calibrate [--out DIR]]

Two tables. *Planning*: `plan_transfer` with its arguments in memory, in a fresh process for each
case: best wall and CPU seconds of some rounds and the peak memory of that process, torch not
imported. *Plans*: published transfers of large models (a 400 Gbit/s network card for each GPU, 8
GPUs and NVLink in each host) with the bound, the busiest link and their ratio, and the time that
the simulator gives. ``--calibrate`` adds real transfers between processes of this machine over
shared memory, `process_vm_readv`, TCP, gloo (``process_group``) and NIXL, links fitted to some of
them, and how far the simulator is off with these on the others;
``cosmos-weightsync simulate --topology`` reads the links from the files in DIR.
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import calibration
from planner_models import (
    DEEPSEEK_V3,
    DENSE_640B,
    KIMI_K2,
    QWEN3_30B,
    QWEN3_235B,
    QWEN25_72B,
    Cut,
    Model,
    layout,
)

from cosmos_weightsync import Place, Topology, plan_transfer, simulate


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One transfer."""

    title: str
    model: Model
    senders: Cut
    receivers: Cut
    dtype: str = "bfloat16"
    place: Callable[[int, int], Topology] = Topology.uniform
    target_s: float | None = None

    def build(self):
        topology = self.place(self.senders.ranks, self.receivers.ranks)
        sides = (
            layout(self.model, self.senders, self.dtype),
            layout(self.model, self.receivers, self.dtype),
        )
        return *sides, topology


def two_and_thirty(num_senders: int, num_receivers: int) -> Topology:
    """Four hosts of eight; the first two GPUs train."""
    places = [Place(f"host-{gpu // 8}", gpu % 8, gpu % 8) for gpu in range(32)]
    return Topology(senders=tuple(places[:num_senders]), receivers=tuple(places[num_senders:]))


PLANNING = (
    Case(
        title="Qwen3-30B-A3B, 256 FSDP x EP8 to 16 (2 x TP8)",
        model=QWEN3_30B,
        senders=Cut(fsdp=256, ep=8),
        receivers=Cut(replicas=2, tp=8),
        target_s=0.5,
    ),
    Case(
        title="Qwen3-30B-A3B, 256 FSDP to 16 (2 x TP8, EP8)",
        model=QWEN3_30B,
        senders=Cut(fsdp=256),
        receivers=Cut(replicas=2, tp=8, ep=8),
        target_s=0.5,
    ),
    Case(
        title="Qwen3-30B-A3B, 256 HSDP 2 x 128 to 16 (16 x TP1)",
        model=QWEN3_30B,
        senders=Cut(replicas=2, fsdp=128),
        receivers=Cut(replicas=16),
        target_s=0.5,
    ),
    Case(
        title="20,046 tensors, 2048 FSDP x EP8 to 2048 (256 x TP8)",
        model=replace(QWEN3_30B, layers=51),
        senders=Cut(fsdp=2048, ep=8),
        receivers=Cut(replicas=256, tp=8),
        target_s=5.0,
    ),
    Case(
        title="20,046 tensors, 2048 HSDP 8 x 256 to 2048 (64 x TP32, EP32)",
        model=replace(QWEN3_30B, layers=51),
        senders=Cut(replicas=8, fsdp=256, ep=8),
        receivers=Cut(replicas=64, tp=32, ep=32),
        target_s=5.0,
    ),
)

PLANS = (
    Case(
        title="K2 fp8, 256 to 128, EP128, attention everywhere",
        model=KIMI_K2,
        senders=Cut(fsdp=256, ep=8),
        receivers=Cut(tp=128, ep=128, attention_replicas=True),
        dtype="float8_e4m3fn",
    ),
    Case(
        title="K2 fp8, 256 to TP32 EP32",
        model=KIMI_K2,
        senders=Cut(fsdp=256, ep=8),
        receivers=Cut(tp=32, ep=32),
        dtype="float8_e4m3fn",
    ),
    Case(
        title="K2 fp8, 256 to 128 whole copies",
        model=KIMI_K2,
        senders=Cut(fsdp=256, ep=8),
        receivers=Cut(replicas=128),
        dtype="float8_e4m3fn",
    ),
    Case(
        title="DeepSeek-V3 bf16, 256 to 8 x TP32",
        model=DEEPSEEK_V3,
        senders=Cut(fsdp=256, ep=16),
        receivers=Cut(replicas=8, tp=32, ep=32),
    ),
    Case(
        title="Qwen3-235B bf16, 8 to TP8",
        model=QWEN3_235B,
        senders=Cut(fsdp=8, ep=8),
        receivers=Cut(tp=8),
    ),
    Case(
        title="640B dense bf16, 128 to TP16",
        model=DENSE_640B,
        senders=Cut(fsdp=32, tp=4),
        receivers=Cut(tp=16),
    ),
    Case(
        title="Qwen3-30B bf16, 2 to 30 whole copies",
        model=QWEN3_30B,
        senders=Cut(fsdp=2),
        receivers=Cut(replicas=30),
        place=two_and_thirty,
    ),
    Case(
        title="Qwen2.5-72B bf16, 8 to 16 x TP8, passed on",
        model=QWEN25_72B,
        senders=Cut(fsdp=8),
        receivers=Cut(replicas=16, tp=8),
    ),
)


def planning_row(case: Case, rounds: int) -> dict:
    arguments = case.build()
    wall, cpu = [], []
    for _ in range(rounds):
        started, cpu_started = time.perf_counter(), time.process_time()
        plan = plan_transfer(*arguments)
        wall.append(time.perf_counter() - started)
        cpu.append(time.process_time() - cpu_started)
    started = time.process_time()
    plan.pieces(source=plan.sources_of(0)[0], receiver=0)
    return {
        "case": case.title,
        "tensors": len(arguments[1].tensors),
        "plan_s": min(wall),
        "plan_cpu_s": min(cpu),
        "target_s": case.target_s,
        "edge_cpu_s": time.process_time() - started,
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def plan_row(case: Case) -> dict:
    plan = plan_transfer(*case.build())
    stats = plan.stats()
    started = time.process_time()
    simulated = simulate(plan)
    return {
        "case": case.title,
        "gigabytes": stats.total_bytes / 1e9,
        "relayed": stats.relayed_bytes / stats.total_bytes,
        "bound_s": stats.bound_s,
        "bound_without_relays_s": plan.lower_bound(relays="never"),
        "busiest_s": stats.busiest_s,
        "ratio": stats.ratio,
        "simulated_s": simulated.seconds,
        "simulator_cpu_s": time.process_time() - started,
        "flows": len(simulated.spans),
    }


def in_a_fresh_process(kind: str, index: int, options: argparse.Namespace) -> dict:
    command = [sys.executable, __file__, "--row", kind, str(index), "--rounds", str(options.rounds)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout)


def tables(planning: list[dict], plans: list[dict]) -> str:
    lines = [
        "| planning | tensors | wall s | CPU s | target s | one edge, CPU s | peak MiB |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row['case']} | {row['tensors']} | {row['plan_s']:.3f} | {row['plan_cpu_s']:.3f} | "
        f"{row['target_s']} | {row['edge_cpu_s']:.3f} | {row['peak_mib']:.0f} |"
        for row in planning
    ]
    lines += [
        "",
        "| plan | GB delivered | relayed | bound s | bound s, no relays | busiest link s | ratio "
        "| simulated s | flows | simulator CPU s |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row['case']} | {row['gigabytes']:.0f} | {row['relayed']:.0%} | {row['bound_s']:.3f} | "
        f"{row['bound_without_relays_s']:.3f} | {row['busiest_s']:.3f} | {row['ratio']:.3f} | "
        f"{row['simulated_s']:.3f} | {row['flows']:,} | {row['simulator_cpu_s']:.1f} |"
        for row in plans
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")
    parser.add_argument("--quick", action="store_true", help="the first case of each table only")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--calibrate", action="store_true", help="real transfers, links, errors")
    parser.add_argument(
        "--transports",
        default="",
        help="with --calibrate: which, with commas; by default all that are installed",
    )
    parser.add_argument("--out", type=Path, help="where --calibrate writes links-TRANSPORT.json")
    parser.add_argument("--row", nargs=2, metavar=("TABLE", "NUMBER"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.row:
        kind, index = options.row[0], int(options.row[1])
        row = (
            planning_row(PLANNING[index], options.rounds)
            if kind == "planning"
            else plan_row(PLANS[index])
        )
        print(json.dumps(row))
        return
    rows: dict[str, list[dict]] = {"planning": [], "plans": []}
    for kind, cases in (("planning", PLANNING), ("plans", PLANS)):
        for index in range(1 if options.quick else len(cases)):
            print(f"{kind}: {cases[index].title}", file=sys.stderr, flush=True)
            rows[kind].append(in_a_fresh_process(kind, index, options))
    if options.calibrate:
        rounds = 2 if options.quick else 5
        transports = ["tcp"] if options.quick else calibration.transports_here()
        if options.transports:
            transports = options.transports.split(",")
        rows["calibration"] = calibration.calibrate(options.out, rounds, transports)
    if options.json:
        print(json.dumps(rows, indent=2))
        return
    print(tables(rows["planning"], rows["plans"]))
    if options.calibrate:
        print("\n" + calibration.tables(rows["calibration"]))


if __name__ == "__main__":
    main()
