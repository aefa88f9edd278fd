"""torchstore's arm of the weight-sync benchmark, in processes of its own.

    python benchmarks/weightsync_torchstore.py --mib 1970 --repeats 3

Its clients have to be Monarch actors, so `weightsync.py` runs this script in an environment of its
own, before its rounds and after them. Four actors put the shards that FSDP2 gave them, each into a
volume in its own process; two get what the two workers of a tensor-parallel engine hold, slice by
slice, into memory that they have. Each turn is one line of JSON.
"""

import argparse
import asyncio
import contextlib
import json
import tempfile
import time
from typing import Any

import psutil
import torchstore
from monarch.actor import shutdown_context, this_host
from weightsync_model import NUM_RECEIVERS, NUM_SENDERS, Size
from weightsync_torchstore_actors import Receiver, Sender

WARM_TURNS = 2


def tree_cpu_s() -> float:
    """CPU seconds of this process and all that it started."""
    tree = [psutil.Process(), *psutil.Process().children(recursive=True)]
    return sum(sum(process.cpu_times()[:2]) for process in tree)


async def run(options: argparse.Namespace, store: str) -> None:
    size = Size(model=options.model, mib=options.mib)
    there = this_host().spawn_procs(per_host={"gpus": NUM_SENDERS})
    here = this_host().spawn_procs(per_host={"gpus": NUM_RECEIVERS})
    await torchstore.initialize(NUM_SENDERS, torchstore.LocalRankStrategy(), mesh=there)
    senders: Any = there.spawn("senders", Sender, size, store)
    receivers: Any = here.spawn("receivers", Receiver, size)
    for turn in range(WARM_TURNS + options.repeats):
        await senders.start_turn.call()
        await receivers.start_turn.call()
        cpu_s, began = tree_cpu_s(), time.monotonic()
        await senders.put.call()
        put = time.monotonic()
        await receivers.get.call()
        got = time.monotonic()
        if turn >= WARM_TURNS:
            measured = {
                "seconds": {"publish": put - began, "pull": got - put},
                "cpu_s": tree_cpu_s() - cpu_s,
                "sender_mib": max(list((await senders.grown_mib.call()).values())),
                "receiver_mib": max(list((await receivers.grown_mib.call()).values())),
            }
            print(json.dumps(measured), flush=True)
    for found in (await receivers.wrong.call()).values():
        if found:
            raise RuntimeError(f"torchstore brought other bytes for {found[:3]}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mib", type=int, default=1970, help="model size in bfloat16")
    parser.add_argument("--model", choices=("dense", "mixture"), default="dense")
    parser.add_argument("--repeats", type=int, default=3, help="timed turns")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(run(options, f"{folder}/store"))
    with contextlib.suppress(TimeoutError):  # it takes its time where cores are busy
        shutdown_context().get(timeout=10.0)


if __name__ == "__main__":
    main()
