"""A sender or a receiver of half contiguous, half strided pieces that watches its own memory."""

import json
import sys
from pathlib import Path
from typing import Any

import torch

from cosmos_weightsync import (
    Box,
    ReceiverConfig,
    SenderConfig,
    Shard,
    ShardSpec,
    WeightReceiver,
    WeightSender,
)

WIDTH = 1024


def status_mib(field: str) -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) / 1024
    raise KeyError(field)


def say(answer: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def specs(mib: int, box: Box) -> list[ShardSpec]:
    """Tensors of 4 MiB in bfloat16."""
    shape = (2048, WIDTH)
    return [ShardSpec(f"t{index}", shape, box, "bfloat16") for index in range(mib // 4)]


def change(shards: list[Shard], version: int) -> None:
    """Every fourth value becomes another, where it lies: nearly as many as are told as a list.

    What is allocated for it and freed again might stay with the process, as transfers' own does.
    """
    generator = torch.Generator().manual_seed(version)
    for shard in shards:
        shard.tensor.view(-1)[version % 4 :: 4].normal_(generator=generator)


def main() -> None:
    setup = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    end: Any
    shards: list[Shard] = []
    if "endpoints" in setup:
        wanted = [
            item
            for index, item in enumerate(specs(setup["mib"], Box.full((2048, WIDTH))))
            if index % 2
        ]
        halves = specs(setup["mib"], Box((0, WIDTH // 2), (2048, WIDTH)))
        wanted += [item for index, item in enumerate(halves) if index % 2 == 0]
        config = ReceiverConfig(
            transport=setup["transport"],
            bucket_bytes=setup["bucket_bytes"],
            reuse=setup.get("reuse", "nothing"),
        )
        end = WeightReceiver(setup["endpoints"], wanted=wanted, config=config)
        say({})
    else:
        rank, num_ranks = setup["rank"], setup["num_ranks"]
        rows = 2048 // num_ranks
        part = specs(setup["mib"], Box((rows * rank, 0), (rows * (rank + 1), WIDTH)))
        shards = [Shard(spec, torch.ones(spec.box.shape, dtype=torch.bfloat16)) for spec in part]
        end = WeightSender(
            shards,
            rank=rank,
            num_ranks=num_ranks,
            config=SenderConfig(bucket_bytes=setup["bucket_bytes"]),
        )
        say({"endpoint": end.endpoint})
    before = 0.0
    for line in sys.stdin:
        command = json.loads(line)
        answer: dict[str, Any] = {}
        match command["do"]:
            case "forget_peak":
                Path("/proc/self/clear_refs").write_text("5")
                before = status_mib("VmRSS")
            case "publish":
                end.publish(command["version"])
            case "change":
                change(shards, command["version"])
            case "stage":
                staged = end.stage(command["version"])
                answer = {"wire_share": staged.wire_bytes / staged.num_bytes}
            case "grown":
                answer = {"mib": status_mib("VmHWM") - before}
        say(answer)


if __name__ == "__main__":
    main()
