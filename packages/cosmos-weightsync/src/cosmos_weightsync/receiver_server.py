"""Where a receiver passes on what it has."""

from collections.abc import Sequence

from cosmos_weightsync.buckets import BucketPool
from cosmos_weightsync.holding import Holder
from cosmos_weightsync.receiver_config import ReceiverConfig
from cosmos_weightsync.server import Server
from cosmos_weightsync.serving import HolderIdentity, ServingSession
from cosmos_weightsync.transports import Transport

__all__ = ["serve_received"]


def serve_received(
    config: ReceiverConfig, holder: Holder, transports: Sequence[Transport]
) -> Server:
    """Let others fetch what a receiver holds now and later.

    Raises:
        ConfigurationError: ``config.serve_host`` is no address of this machine.
    """
    name = config.name or "receiver"
    identity = HolderIdentity(
        role="receiver",
        rank=0,
        num_ranks=1,
        name=name,
        holder=holder,
        transports={item.name: item for item in transports},
        token=config.token,
        host=config.serve_host,
        buckets=BucketPool(config.bucket_bytes, name),  # Who serves never waits for who fetches.
        idle_s=3600.0,
    )
    address = config.serve_host, 0
    return Server(address, lambda c: ServingSession(identity, c), "weight-receiver")
