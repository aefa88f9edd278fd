"""What needs a GPU: CUDA IPC and NCCL between two processes, packing and casting on a device.

In one process neither can a handle be opened nor NCCL join two ranks on a device: no threads here.
"""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from capabilities import skip_without

from cosmos_weightsync import (
    Box,
    DeadlineError,
    Piece,
    TransportUnavailableError,
)
from cosmos_weightsync.buckets import BucketPool
from cosmos_weightsync.checksums import tensor_checksum
from cosmos_weightsync.chunks import HeldBoxes
from cosmos_weightsync.deadlines import Deadline
from cosmos_weightsync.edges import pull_edge
from cosmos_weightsync.transports import CudaIpcTransport, ProcessGroupTransport
from cosmos_weightsync.transports.cuda_ipc import receiving
from cosmos_weightsync.transports.host_sockets import HostConnection

BUCKET_BYTES = 1 << 20
BOXES = {"rows": Box((100, 0), (700, 512)), "columns": Box((3, 77), (700, 333))}
SHAPE = (700, 512)

# Holds both tensors where the second argument says, and serves the edge twice over the third.
SENDER = """
import json, sys, torch
from cosmos_weightsync import Box, Piece
from cosmos_weightsync.chunks import HeldBoxes
from cosmos_weightsync.deadlines import Deadline
from cosmos_weightsync.buckets import BucketPool
from cosmos_weightsync.edges import serve_edge
from cosmos_weightsync.transports import CudaIpcTransport, ProcessGroupTransport
boxes, shape, bucket = json.loads(sys.argv[1])
pieces, held = [], []
for seed, (name, (start, stop)) in enumerate(boxes.items()):
    box = Box(tuple(start), tuple(stop))
    pieces.append(Piece(name, box, 0, 0, 4 * box.numel))
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    held.append((name, Box.full(shape), values.to(sys.argv[2])))
if sys.argv[3] == "nccl":
    transport = ProcessGroupTransport("nccl")
else:
    transport = CudaIpcTransport()
pending = transport.prepare("sender", "127.0.0.1")
print(json.dumps(dict(pending.description)), flush=True)
channel = pending.connect(json.loads(sys.stdin.readline()), Deadline.after(60))
for _ in range(2):
    sums = serve_edge(channel, pieces, HeldBoxes(held), BucketPool(bucket), Deadline.after(60),
                      bucket_bytes=bucket)
    print(json.dumps(sums), flush=True)
sys.stdin.readline()
"""


def test_without_a_device_the_transport_says_so():
    if torch.cuda.is_available():
        skip_without("no-gpu")
    with pytest.raises(TransportUnavailableError, match="needs a CUDA device"):
        CudaIpcTransport().prepare("sender", "")


def test_one_process_is_refused_before_it_asks_for_a_device():
    ours, theirs = socket.socketpair()
    with ours, theirs, pytest.raises(TransportUnavailableError, match="LocalTransport"):
        receiving(HostConnection(ours, "sender"), Deadline.after(60))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("over", "held_in", "wanted_in"),
    [
        ("cuda_ipc", "cuda", "cuda"),
        ("cuda_ipc", "cuda", "cpu"),
        ("cuda_ipc", "cpu", "cuda"),
        ("cuda_ipc", "cpu", "cpu"),
        ("nccl", "cuda", "cuda:1"),  # Both boxes in one group of sends, in buckets on the device.
    ],
)
def test_an_edge_moves_its_boxes_between_processes(over, held_in, wanted_in):
    if over == "nccl" and torch.cuda.device_count() < 2:
        skip_without("two-gpus")
    source = Path(sys.modules["cosmos_weightsync"].__file__ or "").parents[1]
    paths = [*filter(None, [os.environ.get("PYTHONPATH")]), str(source)]
    boxes = {name: (box.start, box.stop) for name, box in BOXES.items()}
    sender = subprocess.Popen(
        [sys.executable, "-c", SENDER, json.dumps([boxes, SHAPE, BUCKET_BYTES]), held_in, over],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        start_new_session=True,
    )
    assert sender.stdin is not None
    assert sender.stdout is not None
    with sender, sender.stdin, sender.stdout:
        try:
            ours = ProcessGroupTransport("nccl", 1) if over == "nccl" else CudaIpcTransport()
            pending = ours.prepare("receiver", "127.0.0.1")
            description = json.loads(sender.stdout.readline())
            print(json.dumps(dict(pending.description)), file=sender.stdin, flush=True)
            channel = pending.connect(description, Deadline.after(60))
            pieces = [Piece(name, box, 0, 0, 4 * box.numel) for name, box in BOXES.items()]
            target = {name: torch.zeros(SHAPE, device=wanted_in) for name in BOXES}
            held = HeldBoxes((name, Box.full(SHAPE), tensor) for name, tensor in target.items())
            device = torch.device(wanted_in if "cuda" in wanted_in else "cuda:0")
            torch.cuda.reset_peak_memory_stats(device)
            before = torch.cuda.memory_allocated(device)
            for _ in range(2):  # The second time over handles that are open already.
                arrived = pull_edge(
                    channel,
                    pieces,
                    held,
                    BucketPool(BUCKET_BYTES),
                    Deadline.after(60),
                    bucket_bytes=BUCKET_BYTES,
                )
                assert arrived == json.loads(sender.stdout.readline())
            assert torch.cuda.max_memory_allocated(device) <= before + BUCKET_BYTES
            channel.close()
        finally:
            sender.kill()
    for seed, (piece, checksum) in enumerate(zip(pieces, arrived, strict=True)):
        sent = torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed))
        part = piece.box.relative_to(Box.full(SHAPE))
        found = target[piece.name].cpu()
        assert torch.equal(found[part], sent[part])
        assert checksum == tensor_checksum(sent[part])
        found[part] = 0
        assert not found.any()  # Nothing beside the box was written.


@pytest.mark.gpu
def test_what_a_gpu_casts_and_packs_is_what_a_processor_would():
    from cosmos_weightsync.chunks import pack, schedule, unpack

    values = torch.randn(SHAPE, generator=torch.Generator().manual_seed(3))
    pieces = [Piece(name, box, 0, 0, 2 * box.numel) for name, box in BOXES.items()]
    there = {name: torch.zeros(SHAPE, dtype=torch.bfloat16, device="cuda") for name in BOXES}
    held = HeldBoxes((n, Box.full(SHAPE), values.cuda().bfloat16()) for n in BOXES)
    wanted = HeldBoxes((n, Box.full(SHAPE), tensor) for n, tensor in there.items())
    bucket = torch.empty(BUCKET_BYTES, dtype=torch.uint8, device="cuda")
    for message in schedule(pieces, BUCKET_BYTES, BUCKET_BYTES):
        unpack(message, wanted, pack(message, held, bucket))
    for name, box in BOXES.items():
        part = box.relative_to(Box.full(SHAPE))
        assert torch.equal(there[name].cpu()[part], values.bfloat16()[part])


# Says where it is and does not come, as who dies or is refused there does.
SILENT = """
import json, sys
from cosmos_weightsync.transports import ProcessGroupTransport
pending = ProcessGroupTransport("nccl").prepare("sender", "127.0.0.1")
print(json.dumps(dict(pending.description)), flush=True)
sys.stdin.readline()
"""


@pytest.mark.gpu
def test_nccl_waits_no_longer_than_the_deadline_for_an_end_that_does_not_come():
    source = Path(sys.modules["cosmos_weightsync"].__file__ or "").parents[1]
    paths = [*filter(None, [os.environ.get("PYTHONPATH")]), str(source)]
    with subprocess.Popen(
        [sys.executable, "-c", SILENT],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
    ) as silent:
        try:
            device = 1 if torch.cuda.device_count() > 1 else 0
            pending = ProcessGroupTransport("nccl", device).prepare("receiver", "127.0.0.1")
            description = json.loads(silent.stdout.readline())
            with pytest.raises(DeadlineError, match=r"the sender did not come in 1\.9"):
                pending.connect(description, Deadline.after(2.0))
        finally:
            silent.kill()


@pytest.mark.gpu
@pytest.mark.slow
def test_the_benchmark_holds_every_kind_of_work_against_a_copy():
    script = Path(__file__).parents[2] / "benchmarks" / "weightsync_gpu.py"
    command = [sys.executable, str(script), "--mib", "64", "--repeats", "3"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=300)
    rows = [line.split(" | ")[0] for line in done.stdout.splitlines()[2:]]
    kinds = ["copy", "pack half of the columns", "cast to bfloat16", "FP8 by rows"]
    assert rows == [f"| {kind}" for kind in [*kinds, "FP8 by blocks", "read over CUDA IPC"]]
