"""Who this process is among the ranks of its replica, and how it meets the others.

Nothing here reads the environment: the app passes every value.
"""

import socket
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store, TCPStore

from cosmos_core.addresses import listen_on
from cosmos_parallel.errors import ParallelError
from cosmos_parallel.titan import DeviceType


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessContext:
    """This process's place in its replica.

    Attributes:
        rank: 0 to ``world_size - 1``.
        world_size: number of ranks in the replica.
        device: where this rank computes.
    """

    rank: int = 0
    world_size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @property
    def device_type(self) -> DeviceType:
        """``"cpu"`` or ``"cuda"``."""
        return "cuda" if self.device.type == "cuda" else "cpu"


def open_store(
    host: str, port: int, *, hosting: bool, world_size: int | None = None, timeout_s: float = 60.0
) -> TCPStore:
    """Open the key-value store through which ranks or replicas find each other.

    Args:
        host: name or address of the process that hosts it, who listens there and nowhere else.
        port: its port; 0 lets the host take a free one (then read ``store.port``).
        hosting: true in the one process that hosts it.
        world_size: wait until this many processes have joined; ``None`` for no waiting.
        timeout_s: how long every operation on it may wait.

    Raises:
        ParallelError: if the address is none of this machine or taken, or nobody answers in time.
    """
    taken = _take(host, port) if hosting else None
    try:
        return TCPStore(
            host,
            taken.getsockname()[1] if taken else port,
            world_size,
            hosting,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=world_size is not None,
            master_listen_fd=taken.detach() if taken else None,  # the store closes it
        )
    except (RuntimeError, ValueError) as error:
        action = "host" if hosting else "reach"
        raise ParallelError(
            f"cannot {action} the store at {host}:{port} within {timeout_s:g} s: {error}"
        ) from error


def _take(host: str, port: int) -> socket.socket:
    """Take an address of this machine; a store that does so itself takes all that it has."""
    try:
        return listen_on(host, port)
    except (OSError, UnicodeError) as error:  # the latter of what can be no host's name
        raise ParallelError(
            f"cannot host the store at {host}:{port}, which has to be an address of this machine "
            f"and a port that nobody has: {error}"
        ) from error


def init_distributed(
    rank: int,
    world_size: int,
    *,
    store: Store | None = None,
    init_method: str | None = None,
    device: str = "cpu",
    timeout_s: float = 600.0,
) -> ProcessContext:
    """Join the ranks of this replica into the default process group.

    Called once per process, by all ranks. Give either a ``store`` or an ``init_method`` (such as
    ``tcp://127.0.0.1:29500`` or ``file:///shared/file``).

    Args:
        rank: this process's rank.
        world_size: number of ranks.
        store: where the ranks meet.
        init_method: address where the ranks meet.
        device: ``"cpu"`` (gloo), ``"cuda"`` or ``"cuda:1"`` (NCCL, with gloo for host tensors).
        timeout_s: how long a collective may wait for the others.

    Raises:
        ParallelError: if the group exists already, or the ranks did not meet in time.
    """
    if dist.is_initialized():
        raise ParallelError("the default process group exists already; init_distributed runs once")
    if (store is None) == (init_method is None):
        raise ParallelError("give init_distributed a store or an init_method, and not both")
    place = torch.device(device)
    if place.type == "cuda":
        torch.cuda.set_device(place)
    try:
        dist.init_process_group(
            backend="gloo" if place.type == "cpu" else "cpu:gloo,cuda:nccl",
            init_method=init_method,
            store=store,
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout_s),
        )
    except (RuntimeError, ValueError) as error:
        raise ParallelError(
            f"rank {rank} of {world_size} could not join its group in {timeout_s:g} s: {error}"
        ) from error
    return ProcessContext(rank=rank, world_size=world_size, device=place)


def broadcast_bytes(data: bytes | None) -> bytes:
    """Return rank 0's ``data`` on every rank of the default group; the others pass ``None``.

    Every rank calls. A process without a group has its own data back.
    """
    if not dist.is_initialized():
        assert data is not None
        return data
    length = torch.tensor([len(data) if data is not None else 0])
    dist.broadcast(length, src=0)
    buffer = torch.zeros(int(length), dtype=torch.uint8)
    if data:
        buffer.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    if buffer.numel():
        dist.broadcast(buffer, src=0)
    return buffer.numpy().tobytes()


def gather_bytes(data: bytes) -> list[bytes]:
    """Return the data of every rank of the default group, in rank order, on every rank.

    Every rank calls. A process without a group has its own data back.
    """
    if not dist.is_initialized():
        return [data]
    size = dist.get_world_size()
    lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(size)]
    dist.all_gather(lengths, torch.tensor([len(data)]))
    longest = max(1, *(int(length) for length in lengths))
    mine = torch.zeros(longest, dtype=torch.uint8)
    if data:
        mine[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    parts = [torch.zeros_like(mine) for _ in range(size)]
    dist.all_gather(parts, mine)
    return [
        part.numpy().tobytes()[: int(length)] for part, length in zip(parts, lengths, strict=True)
    ]


def shutdown_distributed() -> None:
    """Leave the default process group, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()
