"""The edges of a plan as flows through ports of limited capacity, moving at fair rates.

A *flow* is what one rank takes from another of one stream of the plan. It occupies the port where
it leaves and the port where it arrives; flows share a port evenly, and a flow that is slower
elsewhere leaves its share to the others (max-min fairness). A flow out of a relay begins when the
relay has one chunk of the stream, stays one chunk behind, and so is never faster than the relay is
fed until the relay has everything.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cosmos_weightsync.layout import IntArray
from cosmos_weightsync.streams import Streams, ports
from cosmos_weightsync.topology import Topology

__all__ = ["FloatArray", "Flows", "Mask", "fair_rates", "flows_of", "relayed_routes"]

FloatArray = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]
NO_NODE = -1


@dataclass(frozen=True, eq=False, slots=True)
class Flows:
    """Row i is one flow.

    A *node* is one stream at one receiver, ``stream * num_receivers + receiver``. Streams that
    nobody relays are one stream, -1 of them all, whose nodes are numbered by the receiver alone.

    Attributes:
        nodes: Which node each flow feeds.
        upstream: Which node it takes from, `NO_NODE` if from a sender.
        sources: The holder it comes from.
        receivers: The receiver rank it goes to.
        sizes: Its bytes.
        depths: 0 from a sender, 1 from a receiver fed by senders, and so on.
        out: The port it leaves by.
        into: The port it arrives at.
        speeds: Bytes per second of its kind of link.
        latencies: Seconds before its first byte.
        port_names: Of all ports.
    """

    nodes: IntArray
    upstream: IntArray
    sources: IntArray
    receivers: IntArray
    sizes: FloatArray
    depths: IntArray
    out: IntArray
    into: IntArray
    speeds: FloatArray
    latencies: FloatArray
    port_names: tuple[str, ...]

    def keys(self) -> list[tuple[int, int]]:
        """Who feeds which node: equal for the same flow in two plans for the same transfer."""
        return list(zip(self.nodes.tolist(), self.sources.tolist(), strict=True))


def relayed_routes(streams: Streams, num_senders: int) -> frozenset[int]:
    """The streams that some receiver passes on."""
    return frozenset(s.route for s in streams if bool((s.parents >= num_senders).any()))


def flows_of(streams: Streams, topology: Topology, relayed: frozenset[int]) -> Flows:
    """Every delivery of the streams, added up where that changes nothing.

    Args:
        streams: Of a plan.
        topology: Of that plan.
        relayed: Routes of the streams that are told apart, those that anybody relays.
    """
    num_senders, num_receivers = len(topology.senders), len(topology.receivers)
    rows: list[IntArray] = []
    for stream in streams:
        base = (stream.route + 1) * num_receivers if stream.route in relayed else 0
        depths = _depths(stream.receivers, stream.parents, num_senders)
        known = np.flatnonzero(stream.parents >= 0)
        fed = np.flatnonzero(stream.parents < 0)
        count = len(stream.source_bytes)
        columns = np.repeat(np.concatenate([known, fed]), [1] * len(known) + [count] * len(fed))
        by_feed = stream.sources[:, -1 - stream.parents[fed]].T.ravel()
        sources = np.concatenate([stream.parents[known], by_feed])
        sizes = np.concatenate(
            [np.full(len(known), stream.num_bytes), np.tile(stream.source_bytes, len(fed))]
        )
        receivers = stream.receivers[columns]
        upstream = np.where(sources >= num_senders, base + sources - num_senders, NO_NODE)
        row = [base + receivers, upstream, sources, receivers, depths[columns], sizes]
        rows.append(np.stack(row, axis=1))
    table = np.concatenate([np.zeros((0, 6), dtype=np.int64), *rows])
    unique, inverse = np.unique(table[:, :5], axis=0, return_inverse=True)
    sizes = np.zeros(len(unique))
    np.add.at(sizes, inverse.ravel(), table[:, 5])
    nodes, upstream, sources, receivers, depths = unique.T.astype(np.int64)
    kinds, out, into, names = ports(sources, receivers, topology)
    links = topology.links.by_kind()
    return Flows(
        nodes=nodes,
        upstream=upstream,
        sources=sources,
        receivers=receivers,
        sizes=sizes,
        depths=depths,
        out=out,
        into=into,
        speeds=np.array([link.bytes_per_s for link in links])[kinds],
        latencies=np.array([link.latency_s for link in links])[kinds],
        port_names=names,
    )


def _depths(receivers: IntArray, parents: IntArray, num_senders: int) -> IntArray:
    """Hops from the senders to each receiver's parent."""
    above = np.searchsorted(receivers, np.maximum(parents - num_senders, 0))
    # A parent that is not among them has everything already.
    is_relayed = np.isin(parents - num_senders, receivers)
    depths = np.zeros(len(receivers), dtype=np.int64)
    while True:
        deeper = np.where(is_relayed, depths[np.minimum(above, len(receivers) - 1)] + 1, 0)
        if np.array_equal(deeper, depths):
            return depths
        depths = deeper


def fair_rates(flows: Flows, moving: Mask, tied: Mask, num_nodes: int) -> FloatArray:
    """Bytes per second of every flow.

    Args:
        flows: The flows.
        moving: Which of them have something to move.
        tied: Which of these may not be faster than their relay is fed.
        num_nodes: One more than the largest node.
    """
    caps = np.full(len(moving), np.inf)
    rates = _fill(flows, moving, caps)
    for _ in range(3):
        before = caps.copy()
        for depth in np.unique(flows.depths[tied]).tolist():
            fed = np.bincount(flows.nodes, weights=np.minimum(rates, caps), minlength=num_nodes)
            rows = np.flatnonzero(tied & (flows.depths == depth))
            caps[rows] = fed[flows.upstream[rows]]
        if not (rates > caps * (1 + 1e-9)).any() or np.array_equal(before, caps):
            break
        rates = _fill(flows, moving, caps)
    return np.minimum(rates, caps)


def _fill(flows: Flows, moving: Mask, caps: FloatArray) -> FloatArray:
    """Raise all rates together; a flow stops at its cap or when a port of its is full.

    Works on the share of time that a flow occupies its ports, which is its rate over the speed of
    its link.
    """
    shares = np.zeros(len(moving))
    room = np.ones(len(flows.port_names))
    limit = caps / flows.speeds
    rising = np.flatnonzero(moving)
    while len(rising):
        is_copy = flows.out[rising] == flows.into[rising]
        crowd = np.bincount(flows.out[rising], minlength=len(room)).astype(np.float64)
        crowd += np.bincount(flows.into[rising[~is_copy]], minlength=len(room))
        with np.errstate(divide="ignore", invalid="ignore"):
            level = np.where(crowd > 0, np.maximum(room, 0) / crowd, np.inf)
        reach = np.minimum(level[flows.out[rising]], level[flows.into[rising]])
        top = min(float(reach.min()), float(limit[rising].min()))
        stops = (reach <= top * (1 + 1e-9) + 1e-15) | (limit[rising] <= top * (1 + 1e-9) + 1e-15)
        done = rising[stops]
        shares[done] = top
        single = done[flows.out[done] != flows.into[done]]
        room -= np.bincount(flows.out[done], minlength=len(room)) * top
        room -= np.bincount(flows.into[single], minlength=len(room)) * top
        rising = rising[~stops]
    return shares * flows.speeds
