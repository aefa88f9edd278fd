"""The edges of a plan as flows of bytes, for `cosmos_weightsync.fluid` to move."""

import numpy as np

from cosmos_weightsync.fluid import NO_NODE, FloatArray, Flows
from cosmos_weightsync.layout import IntArray
from cosmos_weightsync.plans import TransferPlan
from cosmos_weightsync.streams import Stream, Streams, ports

__all__ = ["flows_of", "relayed_routes"]


def relayed_routes(streams: Streams, num_senders: int) -> frozenset[int]:
    """The streams that some receiver passes on."""
    return frozenset(s.route for s in streams if bool((s.parents >= num_senders).any()))


def flows_of(plan: TransferPlan, streams: Streams, relayed: frozenset[int]) -> Flows:
    """Every delivery of the streams, added up where that changes nothing.

    A node is numbered ``stream * num_receivers + receiver``. Streams that nobody relays are one
    stream, -1 of them all, whose nodes are numbered by the receiver alone.

    Args:
        plan: The plan.
        streams: Its streams.
        relayed: Routes of the streams that are told apart, those that anybody relays.
    """
    num_senders, num_receivers, topology = plan.num_senders, plan.num_receivers, plan.topology
    rows: list[IntArray] = [np.zeros((0, 6), dtype=np.int64)]
    for stream in streams:
        base = (stream.route + 1) * num_receivers if stream.route in relayed else 0
        rows.append(_rows(stream, base, num_senders))
    table = np.concatenate(rows)
    unique, inverse = np.unique(table[:, :4], axis=0, return_inverse=True)
    sums: list[FloatArray] = [
        np.bincount(inverse.ravel(), table[:, column], len(unique)).astype(np.float64)
        for column in (4, 5)
    ]
    nodes, upstream, sources, receivers = unique.T.astype(np.int64)
    found = ports(sources, receivers, topology)
    links = topology.links.by_kind()
    speeds = np.array([link.bytes_per_s for link in links])[found.kinds]
    limits = np.array([link.stream_bytes_per_s or np.inf for link in links])[found.kinds]
    # Large pieces travel in chunks.
    messages = np.maximum(sums[1], np.ceil(sums[0] / plan.chunk_bytes))
    overhead = messages * np.array([link.piece_s for link in links])[found.kinds]
    overhead *= np.minimum(speeds, limits)
    sizes = sums[0] + overhead
    return Flows(
        nodes=nodes,
        upstream=upstream,
        sources=sources,
        receivers=receivers,
        sizes=sizes,
        overheads=overhead / np.maximum(sizes, 1.0),
        ports=found.used,
        weights=found.weights,
        speeds=speeds,
        limits=limits,
        latencies=np.array([link.latency_s for link in links])[found.kinds],
    )


def _rows(stream: Stream, base: int, num_senders: int) -> IntArray:
    """Node, upstream node, source, receiver, bytes, pieces of each delivery of a stream."""
    known = np.flatnonzero(stream.parents >= 0)
    fed = np.flatnonzero(stream.parents < 0)
    count = len(stream.source_bytes)
    columns = np.repeat(np.concatenate([known, fed]), [1] * len(known) + [count] * len(fed))
    by_feed = stream.sources[:, -1 - stream.parents[fed]].T.ravel()
    sources = np.concatenate([stream.parents[known], by_feed])
    sizes = np.full(len(known), stream.num_bytes), np.tile(stream.source_bytes, len(fed))
    pieces = np.full(len(known), stream.num_pieces), np.tile(stream.source_pieces, len(fed))
    receivers = stream.receivers[columns]
    upstream = np.where(sources >= num_senders, base + sources - num_senders, NO_NODE)
    row = [
        base + receivers,
        upstream,
        sources,
        receivers,
        np.concatenate(sizes),
        np.concatenate(pieces),
    ]
    return np.stack(row, axis=1)
