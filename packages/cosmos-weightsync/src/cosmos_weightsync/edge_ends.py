"""One end of an edge, with the memory that it may take on the way."""

from collections.abc import Sequence
from dataclasses import dataclass

from cosmos_weightsync.buckets import BucketPool
from cosmos_weightsync.planning import Piece
from cosmos_weightsync.transports import Channel

__all__ = ["EdgeEnd"]


@dataclass(frozen=True, slots=True)
class EdgeEnd:
    """One end of an edge between two that have agreed on its pieces.

    Attributes:
        channel: To the other end.
        pieces: In order, alike at both.
        buckets: Memory for what is on the way.
        bucket_bytes: What both agreed on; at most that of ``buckets``.
    """

    channel: Channel
    pieces: Sequence[Piece]
    buckets: BucketPool
    bucket_bytes: int
