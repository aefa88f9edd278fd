"""Which transport an edge uses when nobody says: the one that copies each byte least often.

| edge | candidates, best first |
|---|---|
| GPU memory wanted, same host | `cuda_ipc`, if both have it and see the sender's GPU |
| same host | `shared_memory`, `cross_memory`, then as between hosts |
| between hosts, RDMA on both | `nixl` |
| between hosts | `tcp`, `process_group` |
"""

from collections.abc import Mapping, Sequence

from cosmos_weightsync.errors import TransportUnavailableError
from cosmos_weightsync.transports.contract import Capabilities, Transport

__all__ = ["choose_transport"]


def choose_transport(
    ours: Sequence[Transport],
    offered: Mapping[str, int],
    *,
    same_host: bool,
    same_device: bool = False,
    device: str = "cpu",
) -> Transport:
    """The best of those that both ends have; among equals the first of ours.

    Args:
        ours: What this end has.
        offered: What the holder has, with the copies it knows of (`Capabilities.copies`).
        same_host: Whether both are on one host.
        same_device: Whether this end sees the GPU that the holder is on.
        device: The kind of memory that the bytes are wanted in.

    Raises:
        TransportUnavailableError: they have none in common.
    """

    def is_usable(found: Capabilities) -> bool:
        is_near = (same_host or not found.same_host) and (same_device or not found.same_device)
        return is_near and not found.same_process

    def cost(transport: Transport) -> tuple[bool, int]:
        found = transport.capabilities
        return device not in found.devices, max(found.copies, offered[transport.name])

    usable = [t for t in ours if t.name in offered and is_usable(t.capabilities)]
    if not usable:
        raise TransportUnavailableError(
            f"no transport in common: here {sorted(t.name for t in ours)}, there {sorted(offered)}"
        )
    return min(usable, key=cost)
