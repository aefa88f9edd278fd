"""What a GPU does for weight sync, against its own copy bandwidth. Needs a CUDA device.

    python benchmarks/weightsync_gpu.py [--mib 1024] [--repeats 20]

Packing strided pieces into a bucket, casting, quantising, and reading another process's memory over
CUDA IPC. A row's GB/s counts the bytes read and written; "of copy" holds that against a copy of
one contiguous tensor on the device in the same run. Medians.
"""

import argparse
import statistics
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.multiprocessing as mp
from torch import Tensor

from cosmos_weightsync import Box, Piece, Shard, ShardSpec
from cosmos_weightsync.chunks import HeldBoxes, pack, schedule
from cosmos_weightsync.deadlines import Deadline
from cosmos_weightsync.encodings import BlockFp8, Cast, Encoding, RowwiseFp8, encode
from cosmos_weightsync.transports import CudaIpcTransport, one_sided

WIDTH = 8192


def seconds(work: Callable[[], object], repeats: int) -> float:
    """The median time of some work on the device."""
    found = []
    for turn in range(repeats + 2):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in "ab")
        start.record()
        work()
        stop.record()
        torch.cuda.synchronize()
        if turn > 1:
            found.append(start.elapsed_time(stop) / 1e3)
    return statistics.median(found)


def encoding_row(encoding: Encoding, source: Tensor, repeats: int) -> tuple[int, float]:
    spec = ShardSpec("w", tuple(source.shape), Box.full(tuple(source.shape)), "float32")
    published = encode([Shard(spec, source)], [encoding])
    into = [
        torch.empty(s.box.shape, dtype=getattr(torch, s.dtype), device="cuda")
        for s in published.specs
    ]
    moved = source.nbytes + sum(item.nbytes for item in into)
    return moved, seconds(lambda: published.prepare(spoils=True)(into, None), repeats)


def packing_row(source: Tensor, repeats: int) -> tuple[int, float]:
    """Every other half of the columns, as a sender packs it for one of two workers."""
    box = Box((0, 0), (source.shape[0], WIDTH // 2))
    piece = Piece("w", box, 0, 0, box.numel * source.element_size())
    held = HeldBoxes([("w", Box.full(tuple(source.shape)), source)])
    bucket = torch.empty(piece.num_bytes, dtype=torch.uint8, device="cuda")
    (message,) = schedule([piece], piece.num_bytes, piece.num_bytes)
    return 2 * piece.num_bytes, seconds(lambda: pack(message, held, bucket), repeats)


def hold(told: Any, heard: Any, rows: int, exposures: int) -> None:
    """The other process: expose a tensor again and again."""
    pending = CudaIpcTransport().prepare("sender", "")
    told.put(dict(pending.description))
    channel = pending.connect(heard.get(), Deadline.after(60))
    assert one_sided(channel)
    source = torch.ones(rows, WIDTH, device="cuda")
    for _ in range(exposures):
        channel.expose([source], None, Deadline.after(60))
        channel.await_finish(Deadline.after(60))


def ipc_row(rows: int, repeats: int) -> tuple[int, float]:
    context = mp.get_context("spawn")
    told, heard = context.Queue(), context.Queue()
    peer = context.Process(target=hold, args=(told, heard, rows, repeats + 2))
    peer.start()
    pending = CudaIpcTransport().prepare("receiver", "")
    heard.put(dict(pending.description))
    channel = pending.connect(told.get(), Deadline.after(60))
    assert one_sided(channel)
    target = torch.empty(rows, WIDTH, device="cuda")

    def read() -> None:
        windows = channel.windows([(target.shape, target.dtype)], Deadline.after(60))
        assert windows is not None
        windows[0].read((slice(0, rows), slice(0, WIDTH)), target)
        channel.finish(Deadline.after(60))

    spent = seconds(read, repeats)
    peer.join()
    return 2 * target.nbytes, spent


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--mib", type=int, default=1024, help="size of the tensor in float32")
    parser.add_argument("--repeats", type=int, default=20)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("no CUDA device here: nothing was measured")
    rows = (options.mib << 20) // (4 * WIDTH)
    source = torch.randn(rows, WIDTH, device="cuda")
    copy = torch.empty_like(source)
    measured = {
        "copy": (2 * source.nbytes, seconds(lambda: copy.copy_(source), options.repeats)),
        "pack half of the columns": packing_row(source, options.repeats),
        "cast to bfloat16": encoding_row(Cast(dtype="bfloat16"), source, options.repeats),
        "FP8 by rows": encoding_row(RowwiseFp8(names=("*",)), source, options.repeats),
        "FP8 by blocks": encoding_row(BlockFp8(names=("*",)), source, options.repeats),
        "read over CUDA IPC": ipc_row(rows, options.repeats),
    }
    best = measured["copy"][0] / measured["copy"][1]
    print("| work | ms | GB/s | of copy |\n|---|---|---|---|")
    for name, (moved, spent) in measured.items():
        speed = moved / spent
        print(f"| {name} | {1e3 * spent:.2f} | {speed / 1e9:.0f} | {speed / best:.2f} |")


if __name__ == "__main__":
    main()
