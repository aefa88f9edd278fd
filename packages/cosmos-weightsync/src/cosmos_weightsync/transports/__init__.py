"""Ways to move bytes from one process to another, all behind one two-sided contract."""

from cosmos_weightsync.transports.contract import Channel, PendingChannel, Side, Transport
from cosmos_weightsync.transports.local import LocalTransport
from cosmos_weightsync.transports.process_group import ProcessGroupTransport
from cosmos_weightsync.transports.shared_memory import SharedMemoryTransport
from cosmos_weightsync.transports.tcp import TcpTransport

__all__ = [
    "Channel",
    "LocalTransport",
    "PendingChannel",
    "ProcessGroupTransport",
    "SharedMemoryTransport",
    "Side",
    "TcpTransport",
    "Transport",
]
