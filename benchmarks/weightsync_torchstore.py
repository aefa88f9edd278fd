"""torchstore's arm of the weight-sync benchmark, in processes of its own.

    python benchmarks/weightsync_torchstore.py --mib 1970 --repeats 3

Its clients have to be Monarch actors, so `weightsync.py` runs this script in an environment of its
own, before its rounds and after them. Four actors put the shards that FSDP2 gave them, each into a
volume in its own process; two get what the two workers of a tensor-parallel engine hold, slice by
slice, into memory that they have. Each turn is one line of JSON.
"""

import argparse
import asyncio
import json
import os
import tempfile
import time
from typing import Any

import psutil
import torch
import torch.distributed as dist
import torchstore
from measure import forget_peak, status_mib
from monarch.actor import Actor, current_rank, endpoint, shutdown_context, this_host
from torch.distributed.device_mesh import DeviceMesh
from torchstore.transport.pipe import TensorSlice
from weightsync_model import (
    NUM_RECEIVERS,
    NUM_SENDERS,
    Size,
    Trained,
    carve,
    wanted_specs,
    whole_values,
)

from cosmos_weightsync import Box

WARM_TURNS = 2
_KEY = "model"


class Member(Actor):
    """One process, and how far its memory grew."""

    def __init__(self, size: Size) -> None:
        torch.set_num_threads(1)
        self.size = size
        self.before_mib = 0.0

    @endpoint
    async def start_turn(self) -> None:
        self.before_mib = forget_peak()

    @endpoint
    async def grown_mib(self) -> float:
        return status_mib("VmHWM") - self.before_mib


class Sender(Member):
    """A trainer's rank."""

    def __init__(self, size: Size, store: str) -> None:
        super().__init__(size)
        rank = current_rank().rank
        os.environ["LOCAL_RANK"] = str(rank)  # chooses this process's own volume
        dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=NUM_SENDERS)
        self.model = Trained(size, DeviceMesh("cpu", list(range(NUM_SENDERS))))

    @endpoint
    async def put(self) -> None:
        await torchstore.put_state_dict(dict(self.model.named_tensors()), _KEY)


class Receiver(Member):
    """A worker of an engine."""

    def __init__(self, size: Size) -> None:
        super().__init__(size)
        self.rank = current_rank().rank
        self.specs = wanted_specs(size, self.rank)
        flat = torch.zeros(sum(spec.box.numel for spec in self.specs), dtype=torch.bfloat16)
        self.targets = carve(flat, self.specs)

    @endpoint
    async def get(self) -> None:
        for spec in self.specs:
            wanted = TensorSlice(
                offsets=tuple(spec.box.start),
                coordinates=(),
                global_shape=torch.Size(spec.global_shape),
                local_shape=torch.Size(spec.box.shape),
                mesh_shape=(),
            )
            await torchstore.get(f"{_KEY}/{spec.name}", self.targets[spec.name], wanted)

    @endpoint
    async def wrong(self) -> list[str]:
        """Names of tensors that are not what the senders hold."""
        return [
            spec.name
            for spec, (name, whole) in zip(self.specs, whole_values(self.size), strict=True)
            if not torch.equal(
                self.targets[name], whole[spec.box.relative_to(Box.full(whole.shape))]
            )
        ]


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
    shutdown_context().get(timeout=10.0)


if __name__ == "__main__":
    main()
