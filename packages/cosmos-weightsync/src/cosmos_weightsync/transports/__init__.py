"""Ways to move bytes from one process to another, all behind one contract."""

from cosmos_weightsync.transports.choosing import choose_transport
from cosmos_weightsync.transports.contract import (
    BatchedChannel,
    Capabilities,
    Channel,
    OneSidedChannel,
    PendingChannel,
    Side,
    StreamChannel,
    Transport,
    Window,
    Windows,
    one_sided,
)
from cosmos_weightsync.transports.cross_memory import CrossMemoryTransport
from cosmos_weightsync.transports.cuda_ipc import CudaIpcTransport
from cosmos_weightsync.transports.local import LocalTransport
from cosmos_weightsync.transports.nixl import NixlTransport
from cosmos_weightsync.transports.process_group import ProcessGroupTransport
from cosmos_weightsync.transports.shared_memory import SharedMemoryTransport
from cosmos_weightsync.transports.tcp import TcpTransport

__all__ = [
    "BatchedChannel",
    "Capabilities",
    "Channel",
    "CrossMemoryTransport",
    "CudaIpcTransport",
    "LocalTransport",
    "NixlTransport",
    "OneSidedChannel",
    "PendingChannel",
    "ProcessGroupTransport",
    "SharedMemoryTransport",
    "Side",
    "StreamChannel",
    "TcpTransport",
    "Transport",
    "Window",
    "Windows",
    "choose_transport",
    "one_sided",
]
