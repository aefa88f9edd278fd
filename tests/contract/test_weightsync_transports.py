"""One contract, every transport: two threads, and two processes of which one is killed.

Both ends of `cuda_ipc` cannot be in one process: its senders are in another all the time.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from json import dumps, loads
from pathlib import Path
from typing import Any

import pytest
import torch
from capabilities import needs
from remote_ends import SplitTransport, start_ends

from cosmos_weightsync import Box, DeadlineError, PeerLostError, Piece, WeightSyncError
from cosmos_weightsync.arenas import Arena
from cosmos_weightsync.buckets import BucketPool
from cosmos_weightsync.checksums import tensor_checksum
from cosmos_weightsync.chunks import HeldBoxes
from cosmos_weightsync.deadlines import Deadline
from cosmos_weightsync.edges import pull_edge, serve_edge
from cosmos_weightsync.streaming import PlainRows
from cosmos_weightsync.transports import (
    BatchedChannel,
    Capabilities,
    Channel,
    CrossMemoryTransport,
    CudaIpcTransport,
    LocalTransport,
    NixlTransport,
    ProcessGroupTransport,
    SharedMemoryTransport,
    TcpTransport,
    Transport,
)

HOST = "127.0.0.1"
TRANSPORTS: dict[str, Callable[[], Transport]] = {
    "cross_memory": CrossMemoryTransport,
    "local": LocalTransport,
    "tcp": TcpTransport,
    "tcp_plain": lambda: TcpTransport(PlainRows()),
    "process_group": ProcessGroupTransport,
    # Small slots: messages of several slots, and a ring that fills up.
    "shared_memory": lambda: SharedMemoryTransport(slot_bytes=1000, num_slots=2),
    "nixl": NixlTransport,
}
NOT_EVERYWHERE = {
    "cuda_ipc": pytest.mark.gpu,
    "nixl": needs("nixl", NixlTransport.is_installed()),
}


def each(*names: str) -> list[Any]:
    """Return transports as parameters, with what some of them wait for."""
    return [pytest.param(name, marks=NOT_EVERYWHERE.get(name, ())) for name in names]


MEETING_BY_ADDRESS = each(
    *sorted(set(TRANSPORTS) - {"local", "tcp_plain", "process_group"}), "cuda_ipc"
)
BETWEEN_PROCESSES = [*MEETING_BY_ADDRESS, *each("process_group")]


def one_end(kind: str) -> Transport:
    return CudaIpcTransport() if kind == "cuda_ipc" else TRANSPORTS[kind]()


@pytest.fixture(scope="module")
def other_process() -> Iterator[object]:
    manager, ends = start_ends()
    with manager:
        yield ends


@pytest.fixture(params=each(*sorted(TRANSPORTS), "cuda_ipc"))
def transport(request: pytest.FixtureRequest) -> Transport:
    if request.param == "cuda_ipc":
        return SplitTransport(CudaIpcTransport, request.getfixturevalue("other_process"))
    return TRANSPORTS[request.param]()


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as executor:
        yield executor


@pytest.fixture
def ends(transport: Transport, pool: ThreadPoolExecutor) -> Iterator[tuple[Channel, Channel]]:
    """(sender's end, receiver's end), connected."""
    sender, receiver = transport.prepare("sender", HOST), transport.prepare("receiver", HOST)
    deadline = Deadline.after(20)
    accepted = pool.submit(sender.connect, receiver.description, deadline)
    receiving = receiver.connect(sender.description, deadline)
    sending = accepted.result()
    yield sending, receiving
    sending.close()
    receiving.close()


def soon(seconds: float = 20.0) -> Deadline:
    return Deadline.after(seconds)


def content(size: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)


def send_all(channel: Channel, sizes: list[int]) -> None:
    for seed, size in enumerate(sizes):
        channel.send(content(size, seed).to(channel.device), soon())


def zeros(size: int, channel: Channel) -> torch.Tensor:
    return torch.zeros(size, dtype=torch.uint8, device=channel.device)


def test_messages_arrive_whole_and_in_order(ends, pool):
    sending, receiving = ends
    sizes = [1, 7, 1000, 1001, 5_000, 1_000_003, 2]
    sent = pool.submit(send_all, sending, sizes)
    for seed, size in enumerate(sizes):
        view = zeros(size, receiving)
        receiving.recv_into(view, soon())
        assert torch.equal(view.cpu(), content(size, seed))
    sent.result()


def test_a_view_into_a_larger_buffer_is_filled_and_nothing_else(ends, pool):
    sending, receiving = ends
    buffer = zeros(3000, receiving)
    sent = pool.submit(sending.send, zeros(1500, sending) + 9, soon())
    receiving.recv_into(buffer[700:2200], soon())
    sent.result()
    assert buffer[700:2200].eq(9).all()
    assert buffer.sum() == 9 * 1500


def test_the_view_may_change_once_send_has_returned(ends, pool):
    sending, receiving = ends
    view, arrived = content(500, 3).to(sending.device), zeros(500, receiving)

    def send_and_spoil() -> None:
        sending.send(view, soon())
        view.zero_()

    spoiled = pool.submit(send_and_spoil)
    time.sleep(0.05)
    receiving.recv_into(arrived, soon())
    spoiled.result()
    assert torch.equal(arrived.cpu(), content(500, 3))


def test_a_silent_sender_runs_into_the_deadline(ends):
    with pytest.raises(DeadlineError):
        ends[1].recv_into(zeros(10, ends[1]), soon(0.2))


def test_a_receiver_that_takes_nothing_runs_into_the_deadline(ends):
    def fill() -> None:
        for _ in range(100):  # More than sockets and rings buffer.
            ends[0].send(zeros(1 << 20, ends[0]), soon(0.3))

    with pytest.raises(DeadlineError):
        fill()


@pytest.mark.parametrize("who", ["sender", "receiver"])
def test_the_other_end_closing_ends_the_wait(ends, pool, who):
    sending, receiving = ends
    view = zeros(64 << 20, sending)
    if who == "receiver":
        waiting: Future[None] = pool.submit(receiving.recv_into, view, soon(20))
    else:
        waiting = pool.submit(sending.send, view, soon(20))
    time.sleep(0.05)
    (sending if who == "receiver" else receiving).close()
    with pytest.raises(PeerLostError):
        waiting.result(timeout=15)


def test_closing_ones_own_end_from_another_thread_ends_the_wait(ends, pool):
    waiting = pool.submit(ends[1].recv_into, zeros(10, ends[1]), soon(2))
    time.sleep(0.05)
    ends[1].close()
    with pytest.raises((PeerLostError, DeadlineError)):  # The latter where it cannot be woken.
        waiting.result(timeout=15)


def test_closing_is_allowed_again_and_again(ends):
    for _ in range(3):
        ends[0].close()
        ends[1].close()


@pytest.mark.parametrize("kind", BETWEEN_PROCESSES)
def test_a_sender_that_nobody_joins_gives_up_in_time(kind):
    pending = one_end(kind).prepare("sender", HOST)
    try:
        with pytest.raises(WeightSyncError):
            pending.connect({}, soon(0.3))
    finally:
        pending.close()


def test_many_channels_work_side_by_side(transport, pool):
    def one(seed: int) -> bool:
        sender, receiver = transport.prepare("sender", HOST), transport.prepare("receiver", HOST)

        def send() -> None:
            channel = sender.connect(receiver.description, soon())
            channel.send(content(40_000, seed).to(channel.device), soon())
            ends.append(channel)

        ends: list[Channel] = []
        thread = threading.Thread(target=send)
        thread.start()
        channel = receiver.connect(sender.description, soon())
        arrived = zeros(40_000, channel)
        channel.recv_into(arrived, soon())
        thread.join()
        for end in (*ends, channel):
            end.close()
        return torch.equal(arrived.cpu(), content(40_000, seed))

    assert all(pool.map(one, range(6)))


# What travels on one edge: (full shape, box, dtype). Every tensor is held whole on both sides.
EDGES: dict[str, list[tuple[tuple[int, ...], Box, torch.dtype]]] = {
    "contiguous": [
        ((700, 512), Box((100, 0), (700, 512)), torch.float32),  # More than one block.
        ((9, 5), Box.full((9, 5)), torch.bfloat16),
    ],
    "strided": [
        ((1030, 600), Box((3, 77), (1030, 333)), torch.bfloat16),  # More rows than IOV_MAX.
        ((6, 7, 8), Box((1, 2, 3), (5, 6, 7)), torch.float64),
        ((64, 4096), Box((0, 4095), (64, 4096)), torch.float8_e4m3fn),  # One column.
    ],
    "tiny": [
        ((), Box.full(()), torch.float32),
        ((1, 1, 1), Box.full((1, 1, 1)), torch.int8),
        ((3,), Box((1,), (2,)), torch.bool),
    ],
    "empty": [],
}


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def a_holder(edge: str, fill: str) -> tuple[list[Piece], list[torch.Tensor], Arena]:
    arena = Arena([shape for shape, _, _ in EDGES[edge]], [dtype for _, _, dtype in EDGES[edge]])
    pieces = []
    for index, (_, box, dtype) in enumerate(EDGES[edge]):
        tensor = arena.tensors[index]
        raw = as_bytes(tensor)
        raw.copy_(content(raw.numel(), index) % 2 if fill == "random" else torch.tensor(0))
        pieces.append(Piece(f"t{index}", box, 0, 0, box.numel * dtype.itemsize))
    return pieces, list(arena.tensors), arena


def held(tensors: list[torch.Tensor], arena: Arena | None = None) -> HeldBoxes:
    boxes = [(f"t{index}", Box.full(item.shape), item) for index, item in enumerate(tensors)]
    return HeldBoxes(boxes, arena=arena)


@pytest.mark.parametrize("memory", ["arena", "private"])
@pytest.mark.parametrize("bucket_bytes", [16 << 10, 1 << 20])
@pytest.mark.parametrize("edge", sorted(EDGES))
def test_an_edge_moves_its_boxes_and_nothing_else(ends, pool, edge, bucket_bytes, memory):
    pieces, source, arena = a_holder(edge, "random")
    _, target, _ = a_holder(edge, "zeros")
    held_there = held(source, arena if memory == "arena" else None)
    if memory == "private":
        held_there = held([tensor.to(ends[0].device, copy=True) for tensor in source])
        target = [tensor.to(ends[1].device) for tensor in target]
    for _ in range(2):  # The second time over the same channel.
        serving = pool.submit(
            serve_edge,
            ends[0],
            pieces,
            held_there,
            BucketPool(bucket_bytes),
            soon(),
            bucket_bytes=bucket_bytes,
        )
        buckets = BucketPool(bucket_bytes)
        arrived = pull_edge(
            ends[1], pieces, held(target), buckets, soon(), bucket_bytes=bucket_bytes
        )
        assert arrived == serving.result()
    for piece, sent, found, checksum in zip(pieces, source, target, arrived, strict=True):
        part = piece.box.relative_to(Box.full(sent.shape))
        assert torch.equal(as_bytes(found[part]).cpu(), as_bytes(sent[part]))
        assert checksum == tensor_checksum(sent[part])
        found[part] = 0
        assert not as_bytes(found).any()  # Nothing beside the box was written.


ONE_SIDED = ("expose", "decline", "await_finish", "windows", "finish")


def test_what_a_transport_declares_is_what_its_channels_are(transport, ends):
    declared = transport.capabilities
    for end in ends:
        assert end.capabilities == declared
        found = [hasattr(end, name) for name in ONE_SIDED]
        assert all(found) if declared.one_sided else not any(found)
        assert (declared.groups > 1) == isinstance(end, BatchedChannel)
        assert end.device.type in declared.devices
        assert ("cpu" in declared.devices) == (transport.name != "cuda_ipc")
    assert declared.same_host or not declared.same_process
    assert 0 < declared.direct_bytes <= declared.message_bytes


@pytest.mark.parametrize("order", [list, reversed])
@pytest.mark.parametrize("transport", each("nixl", "process_group"), indirect=True)
def test_as_many_messages_are_taken_before_the_first_is_done_as_is_declared(ends, order):
    sending, receiving = ends
    sent = [content(1000, seed) for seed in range(sending.capabilities.groups)]
    arrived = [torch.zeros(1000, dtype=torch.uint8) for _ in sent]
    begun = [sending.begin_send(view, soon()) for view in sent]  # None is received yet.
    begun_there = [receiving.begin_recv(view, soon()) for view in arrived]
    with ThreadPoolExecutor(1) as other:
        ended = other.submit(lambda: [end() for end in order(begun)])
        for end in order(begun_there):  # Who has waited for the last has waited for all.
            end()
        ended.result()
    assert all(torch.equal(*pair) for pair in zip(sent, arrived, strict=True))


@dataclass
class Counted:
    """An end that notes how long each message is; it is neither batched, one-sided nor a stream."""

    real: Channel
    sizes: list[int] = field(default_factory=list)

    @property
    def capabilities(self) -> Capabilities:
        return replace(self.real.capabilities, one_sided=False)

    @property
    def device(self) -> torch.device:
        return self.real.device

    def send(self, view: torch.Tensor, deadline: Deadline) -> None:
        self.sizes.append(view.numel())
        self.real.send(view, deadline)

    def recv_into(self, view: torch.Tensor, deadline: Deadline) -> None:
        self.real.recv_into(view, deadline)


@pytest.mark.parametrize(("beside", "num_messages"), [(-1, 1), (0, 2), (1, 2)])
def test_pieces_from_direct_bytes_on_travel_alone(ends, pool, beside, num_messages):
    policy = ends[0].capabilities
    size = policy.direct_bytes + beside
    bucket_bytes = 4 * policy.direct_bytes + 256  # Two of them fit into a message.
    names = ["a", "b"]
    source = {name: content(size, seed).to(ends[0].device) for seed, name in enumerate(names)}
    target = {name: zeros(size, ends[1]) for name in names}
    pieces = [Piece(name, Box.full((size,)), 0, 0, size) for name in names]
    there, here = (
        HeldBoxes((name, Box.full((size,)), tensor) for name, tensor in side.items())
        for side in (source, target)
    )
    sending, receiving = Counted(ends[0]), Counted(ends[1])
    buckets = [BucketPool(bucket_bytes) for _ in range(2)]
    serving = pool.submit(
        serve_edge, sending, pieces, there, buckets[0], soon(), bucket_bytes=bucket_bytes
    )
    arrived = pull_edge(receiving, pieces, here, buckets[1], soon(), bucket_bytes=bucket_bytes)
    assert arrived == serving.result()
    assert len(sending.sizes) == num_messages
    assert all(torch.equal(target[name].cpu(), source[name].cpu()) for name in names)


def test_an_edge_whose_source_never_serves_runs_into_the_deadline(ends):
    pieces, target, _ = a_holder("contiguous", "zeros")
    with pytest.raises(DeadlineError):
        pull_edge(ends[1], pieces, held(target), BucketPool(4096), soon(0.2), bucket_bytes=4096)


def test_an_edge_whose_receiver_never_pulls_runs_into_the_deadline(ends):
    pieces = [Piece("t0", Box.full((64 << 20,)), 0, 0, 64 << 20)]
    arena = Arena([(64 << 20,)], [torch.uint8])
    buckets = BucketPool(1 << 20)
    with pytest.raises(DeadlineError):
        serve_edge(
            ends[0],
            pieces,
            held(list(arena.tensors), arena),
            buckets,
            soon(0.3),
            bucket_bytes=1 << 20,
        )


@pytest.mark.parametrize("kind", MEETING_BY_ADDRESS)
@pytest.mark.parametrize("description", [{}, {"address": "nobody", "host": HOST, "port": 1}])
def test_a_description_that_leads_nowhere_is_refused(kind, description):
    pending = one_end(kind).prepare("receiver", HOST)
    with pytest.raises(WeightSyncError):
        pending.connect(description, soon(2))
    pending.close()


# The other process: meets this one, sends or receives without end until it is killed.
PEER = """
import json, sys, torch
from cosmos_weightsync.deadlines import Deadline
from cosmos_weightsync.transports import *
kinds = {"tcp": TcpTransport, "cross_memory": CrossMemoryTransport,
         "process_group": ProcessGroupTransport, "nixl": NixlTransport,
         "cuda_ipc": CudaIpcTransport,
         "shared_memory": lambda: SharedMemoryTransport(slot_bytes=1 << 16, num_slots=2)}
side = sys.argv[2]
pending = kinds[sys.argv[1]]().prepare(side, "127.0.0.1")
print(json.dumps(dict(pending.description)), flush=True)
channel = pending.connect(json.loads(sys.stdin.readline()), Deadline.after(30))
view = torch.zeros(1 << 18, dtype=torch.uint8, device=channel.device)
while True:
    (channel.send if side == "sender" else channel.recv_into)(view, Deadline.after(30))
"""


def forever(step: Callable[[torch.Tensor, Deadline], None], view: torch.Tensor) -> None:
    while True:
        step(view, soon(30))


@pytest.mark.parametrize("kind", BETWEEN_PROCESSES)
@pytest.mark.parametrize("victim", ["sender", "receiver"])
def test_a_killed_peer_is_noticed_and_leaves_nothing_behind(kind, victim, tmp_path):
    transport = one_end(kind)
    if kind == "shared_memory":
        transport = SharedMemoryTransport(slot_bytes=1 << 16, num_slots=2)
    before = set(os.listdir("/dev/shm"))
    source = Path(sys.modules["cosmos_weightsync"].__file__ or "").parents[1]
    paths = [*filter(None, [os.environ.get("PYTHONPATH")]), str(source)]
    peer = subprocess.Popen(
        [sys.executable, "-c", PEER, kind, victim],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"},
        start_new_session=True,
    )
    assert peer.stdin is not None
    assert peer.stdout is not None
    with peer, peer.stdin, peer.stdout:
        try:
            description = loads(peer.stdout.readline())
            pending = transport.prepare("receiver" if victim == "sender" else "sender", HOST)
            print(dumps(dict(pending.description)), file=peer.stdin, flush=True)
            channel = pending.connect(description, soon(30))
            view = zeros(1 << 18, channel)
            step = channel.recv_into if victim == "sender" else channel.send
            for _ in range(20):
                step(view, soon(30))
            threading.Timer(0.1, lambda: os.kill(peer.pid, signal.SIGKILL)).start()
            with pytest.raises(PeerLostError):
                forever(step, view)
            channel.close()
            pending.close()
        finally:
            peer.kill()
    mine = {name for name in set(os.listdir("/dev/shm")) - before if "cosmos-weightsync" in name}
    assert not mine
