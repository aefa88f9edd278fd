"""CUDA IPC between two processes; in one process a handle cannot be opened, so no threads here."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from cosmos_weightsync import Box, Piece, TransportUnavailableError
from cosmos_weightsync.checksums import tensor_checksum
from cosmos_weightsync.chunks import HeldBoxes
from cosmos_weightsync.deadlines import Deadline
from cosmos_weightsync.edges import BucketPool, pull_edge
from cosmos_weightsync.transports import CudaIpcTransport

BUCKET_BYTES = 1 << 20
BOXES = {"rows": Box((100, 0), (700, 512)), "columns": Box((3, 77), (700, 333))}
SHAPE = (700, 512)

# Holds both tensors where the second argument says, and serves the edge twice.
SENDER = """
import json, sys, torch
from cosmos_weightsync import Box, Piece
from cosmos_weightsync.chunks import HeldBoxes
from cosmos_weightsync.deadlines import Deadline
from cosmos_weightsync.edges import BucketPool, serve_edge
from cosmos_weightsync.transports import CudaIpcTransport
boxes, shape, bucket = json.loads(sys.argv[1])
pieces, held = [], []
for seed, (name, (start, stop)) in enumerate(boxes.items()):
    box = Box(tuple(start), tuple(stop))
    pieces.append(Piece(name, box, 0, 0, 4 * box.numel))
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    held.append((name, Box.full(shape), values.to(sys.argv[2])))
pending = CudaIpcTransport().prepare("sender", "")
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
        pytest.skip("waits for a machine without a CUDA device")
    with pytest.raises(TransportUnavailableError, match="needs a CUDA device"):
        CudaIpcTransport().prepare("sender", "")


@pytest.mark.gpu
@pytest.mark.parametrize("wanted_in", ["cuda", "cpu"])
@pytest.mark.parametrize("held_in", ["cuda", "cpu"])
def test_an_edge_moves_its_boxes_between_processes(held_in, wanted_in):
    source = Path(sys.modules["cosmos_weightsync"].__file__ or "").parents[1]
    boxes = {name: (box.start, box.stop) for name, box in BOXES.items()}
    sender = subprocess.Popen(
        [sys.executable, "-c", SENDER, json.dumps([boxes, SHAPE, BUCKET_BYTES]), held_in],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(source)},
        start_new_session=True,
    )
    assert sender.stdin is not None
    assert sender.stdout is not None
    with sender, sender.stdin, sender.stdout:
        try:
            pending = CudaIpcTransport().prepare("receiver", "")
            description = json.loads(sender.stdout.readline())
            print(json.dumps(dict(pending.description)), file=sender.stdin, flush=True)
            channel = pending.connect(description, Deadline.after(60))
            pieces = [Piece(name, box, 0, 0, 4 * box.numel) for name, box in BOXES.items()]
            target = {name: torch.zeros(SHAPE, device=wanted_in) for name in BOXES}
            held = HeldBoxes((name, Box.full(SHAPE), tensor) for name, tensor in target.items())
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
