"""One FSDP rank that publishes quantised weights; ends when its standard input does.

Run by `test_weightsync_quantised_fsdp` as ``python quantising_process.py '{"rank": 0, ...}'``.
"""

import json
import sys
from contextlib import ExitStack

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import init_device_mesh

from cosmos_weightsync import EncodingError, WeightSender, shards_of
from cosmos_weightsync.encodings import AmaxGroup, BlockFp8, MxFp8, NvFp4, RowwiseFp8, encode

torch.set_num_threads(1)


def weights(height: int) -> nn.Module:
    """The same on every rank count; `height` rows per matrix."""
    torch.manual_seed(3)
    model = nn.Module()
    for name in ("block", "row", "mx", "fp4", "fp4_up", "plain"):
        tensor = torch.randn(height, 192) * torch.exp2(torch.randint(-9, 9, (height, 1)))
        setattr(model, name, nn.Parameter(tensor))
    return model


ENCODINGS = (
    BlockFp8(names=("block",)),
    RowwiseFp8(names=("row",)),
    MxFp8(names=("mx",)),
    NvFp4(names=("fp4", "fp4_up"), fused=(("fp4", "fp4_up"),)),
)


def reply(**answer: object) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def publish(sender: WeightSender, version: int) -> str:
    """Why not, if it cannot be published."""
    try:
        sender.publish(version)
    except EncodingError as refused:
        return str(refused)
    return ""


def main() -> None:
    setup = json.loads(sys.argv[1])
    rank, num_ranks = setup["rank"], setup["num_ranks"]
    dist.init_process_group("gloo", f"file://{setup['store']}", rank=rank, world_size=num_ranks)
    mesh = init_device_mesh("cpu", (num_ranks,))
    endpoints: list[str] = []
    errors: list[str] = []
    with ExitStack() as stack:
        for height in setup["heights"]:
            model = weights(height)
            fully_shard(model, mesh=mesh)
            shards = shards_of(model)
            encoded = encode(shards, ENCODINGS, group=AmaxGroup.of_process_group(shards))
            sender = WeightSender(encoded, rank=rank, num_ranks=num_ranks)
            stack.enter_context(sender)
            publish(sender, 1)
            if rank == num_ranks - 1:
                with torch.no_grad():
                    model.block.to_local()[-1] = float("nan")
            errors.append(publish(sender, 2))
            endpoints.append(sender.endpoint)
        reply(endpoints=endpoints, errors=errors)
        sys.stdin.read()
    dist.destroy_process_group()


main()
