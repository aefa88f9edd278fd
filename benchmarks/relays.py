"""How soon the last rollout has a version, from the policy alone or passed on: relays.py [--quick]

Each receiver is a process in a network namespace of its own, and so is the sender; every link out
of one is limited (tc), as a network card is. The receivers stage one version at the same time, from
where a controller would send them: all to the sender, in a chain, or in a tree of two; and so for
the first version of receivers that have met nobody yet. Wants root.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from cosmos_weightsync import (
    ReceiverConfig,
    SenderConfig,
    WeightReceiver,
    WeightSender,
    shards_of,
)

ROOT = Path(__file__).resolve().parent.parent
TENSOR_MIB = 8
TOKEN = "of this benchmark"
SENDER = 0
ARMS: Mapping[str, Callable[[int], int]] = {
    "all from the policy": lambda _: SENDER,
    "a tree of two": lambda number: (number - 1) // 2,
    "a chain": lambda number: number - 1,
}
FIRST = "their first version: "
ARMS = {**ARMS, **{FIRST + arm: ARMS[arm] for arm in ("all from the policy", "a chain")}}


def say(**content: Any) -> None:
    print(json.dumps(content), flush=True)


def hear() -> dict[str, Any]:
    return json.loads(sys.stdin.readline())


def send(address: str, mib: int) -> None:
    """The policy's process: publish a version whenever told to."""
    tensors = [
        (f"layer.{number}.weight", torch.randn(1024, TENSOR_MIB << 9).bfloat16())
        for number in range(mib // TENSOR_MIB)
    ]
    config = SenderConfig(bind_host=address, token=TOKEN)
    with WeightSender(shards_of(tensors), config=config) as sender:
        say(endpoint=sender.endpoint)
        while order := hear():
            sender.publish(order["version"])


def receive(address: str) -> None:
    """A rollout's process: fetch what it is told to from where it is told to, and serve it."""
    config = ReceiverConfig(transport="tcp", token=TOKEN, serve_host=address)
    while True:
        with WeightReceiver(config=config) as receiver:
            say(endpoint=receiver.endpoint)
            while "version" in (order := hear()):
                receiver.connect([order["endpoint"]])
                staged = receiver.stage(order["version"])
                say(done_s=time.time(), digest=staged.digest)
                receiver.commit()


class Worker:
    """A process on a machine of its own."""

    def __init__(self, command: Sequence[str]) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, text=True, env=environment
        )
        self.endpoint = ""

    def tell(self, **content: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(content) + "\n")
        self._process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())

    def end(self) -> None:
        self._process.kill()
        self._process.wait()


def measure(count: int, mib: int, mbit: int, rounds: int) -> dict[str, list[float]]:
    """Seconds from publishing until the last has the version, by arm."""
    sys.path.insert(0, str(ROOT / "tests" / "support"))
    from machines import machines

    seconds: dict[str, list[float]] = {arm: [] for arm in ARMS}
    with machines(count + 1) as made, ExitStack() as ended:
        workers: list[Worker] = []
        for number, machine in enumerate(made):
            limit = ["rate", f"{mbit}mbit", "burst", "256kb", "latency", "100ms"]
            machine.run("tc", "qdisc", "add", "dev", "wire", "root", "tbf", *limit)
            role = "send" if number == SENDER else "receive"
            command = [sys.executable, __file__, "--role", role, "--mib", str(mib)]
            worker = Worker(machine.command(*command, "--address", machine.address))
            ended.callback(worker.end)
            workers.append(worker)
        for worker in workers:
            worker.endpoint = worker.answer()["endpoint"]
        sender, *receivers = workers
        for version, (arm, source) in enumerate([*ARMS.items()] * rounds, start=1):
            if arm.startswith(FIRST):
                for receiver in receivers:
                    receiver.tell(anew=True)
                    receiver.endpoint = receiver.answer()["endpoint"]
            for number, receiver in enumerate(receivers, start=1):
                receiver.tell(version=version, endpoint=workers[source(number)].endpoint)
            time.sleep(0.5)  # all have asked
            began = time.time()
            sender.tell(version=version)
            seconds[arm].append(max(r.answer()["done_s"] for r in receivers) - began)
    return seconds


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--receivers", type=int, default=8)
    parser.add_argument("--mib", type=int, default=128, help="of the model")
    parser.add_argument("--mbit", type=int, default=500, help="per second, of a machine's link")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="smallest form")
    parser.add_argument("--role", choices=["send", "receive"], help=argparse.SUPPRESS)
    parser.add_argument("--address", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.role == "send":
        return send(options.address, options.mib)
    if options.role == "receive":
        return receive(options.address)
    if options.quick:
        options.receivers, options.mib, options.rounds = 2, 16, 1
    bound = options.mib * (1 << 20) * 8 / (options.mbit * 1e6)
    found = measure(options.receivers, options.mib, options.mbit, options.rounds)
    direct = statistics.median(found["all from the policy"])
    what = f"{options.receivers} rollouts, {options.mib} MiB"
    print(f"| {what} | s | range | of one transfer | faster |")
    print("|---|---|---|---|---|")
    for arm, seconds in found.items():
        middle = statistics.median(seconds)
        print(
            f"| {arm} | {middle:.2f} | {min(seconds):.2f}-{max(seconds):.2f} "
            f"| {middle / bound:.1f} | {direct / middle:.1f} |"
        )
    print(f"| one transfer over a link of {options.mbit} Mbit/s | {bound:.2f} | | 1.0 | |")
    return None


if __name__ == "__main__":
    main()
