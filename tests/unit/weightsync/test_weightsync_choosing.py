"""Which transport an edge gets when nobody says."""

from dataclasses import dataclass

import pytest
import torch
from capabilities import needs

from cosmos_weightsync import TransportUnavailableError
from cosmos_weightsync.transports import (
    Capabilities,
    CrossMemoryTransport,
    CudaIpcTransport,
    LocalTransport,
    PendingChannel,
    ProcessGroupTransport,
    SharedMemoryTransport,
    Side,
    TcpTransport,
    choose_transport,
)
from cosmos_weightsync.transports.cuda_ipc import gpu_of, visible_gpus


@dataclass(frozen=True)
class Nixl:
    """NIXL as it is on a machine with, or without, RDMA."""

    copies: int
    name: str = "nixl"

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(registers=True, copies=self.copies)

    def prepare(self, side: Side, host: str) -> PendingChannel:
        raise NotImplementedError


OURS = (
    LocalTransport(),
    SharedMemoryTransport(),
    CrossMemoryTransport(),
    TcpTransport(),
    ProcessGroupTransport(),
    CudaIpcTransport(),
)
ALL = {transport.name: transport.capabilities.copies for transport in OURS}


def only(*names: str) -> dict[str, int]:
    return {name: ALL[name] for name in names}


# what is there, the holder's offers, same host?, wanted in, picked
TABLE = [
    (OURS, ALL, True, "cpu", "shared_memory"),
    (OURS, ALL, False, "cpu", "tcp"),
    (OURS, ALL, True, "cuda", "cuda_ipc"),
    (OURS, ALL, False, "cuda", "tcp"),  # Memory is not mapped across hosts.
    (OURS, only("cross_memory", "tcp"), True, "cpu", "cross_memory"),
    (OURS, only("tcp", "process_group"), True, "cpu", "tcp"),
    (OURS, only("process_group"), False, "cpu", "process_group"),
    (OURS, only("shared_memory", "tcp"), True, "cuda", "shared_memory"),
    ((*OURS, Nixl(0)), {**ALL, "nixl": 0}, False, "cpu", "nixl"),
    ((*OURS, Nixl(0)), {**ALL, "nixl": 3}, False, "cpu", "tcp"),  # The holder has no RDMA.
    ((*OURS, Nixl(3)), {**ALL, "nixl": 0}, False, "cpu", "tcp"),
    ((*OURS, Nixl(3)), {**ALL, "nixl": 3}, True, "cpu", "shared_memory"),
]


@pytest.mark.parametrize(("ours", "offered", "same_host", "device", "picked"), TABLE)
def test_the_fewest_copies_win_and_then_our_order(ours, offered, same_host, device, picked):
    found = choose_transport(
        ours, offered, same_host=same_host, same_device=same_host, device=device
    )
    assert found.name == picked


def test_memory_of_a_gpu_that_is_not_seen_here_comes_through_the_host():
    assert choose_transport(OURS, ALL, same_host=True, device="cuda").name == "shared_memory"


@needs("no-gpu", not torch.cuda.is_available())
def test_a_process_without_cuda_names_no_gpu():
    assert CudaIpcTransport().gpu == gpu_of(OURS) == ""
    assert not visible_gpus()


@pytest.mark.parametrize("offered", [{}, only("local"), only("shared_memory"), {"pigeon": 1}])
def test_nothing_in_common_is_an_error_that_lists_both(offered):
    with pytest.raises(TransportUnavailableError, match="no transport in common: here"):
        choose_transport(OURS, offered, same_host=False)
