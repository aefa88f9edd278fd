"""A plan as flows of bytes: how much follows which route, and how busy that keeps every link."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cosmos_weightsync.layout import IntArray
from cosmos_weightsync.pieces import PieceClass
from cosmos_weightsync.routing import Fanout
from cosmos_weightsync.topology import LINK_KINDS, Topology

__all__ = ["LinkUsage", "Stream", "Streams", "edge_bytes", "link_usage", "ports", "streams_of"]


@dataclass(frozen=True, eq=False, slots=True)
class Stream:
    """All bytes that take the same way from receiver to receiver.

    Attributes:
        route: A number of its own, the same after `replan_without`.
        receivers: The ranks that get them.
        parents: From where each gets them: a holder, or ``-1 - k`` for holders as in `Fanout`.
        num_bytes: How many there are.
        sources: ``[n]`` sets of bytes: the holder each begins at, by k: ``[n, feeds]``.
        source_bytes: ``[n]``, how many bytes each of these sets has.
    """

    route: int
    receivers: IntArray
    parents: IntArray
    num_bytes: int
    sources: IntArray
    source_bytes: IntArray


Streams = tuple[Stream, ...]


@dataclass(frozen=True, slots=True)
class LinkUsage:
    """How long the busiest link is busy, which one it is, and what crosses between hosts."""

    busiest: str
    busiest_s: float
    cross_host_bytes: int


def streams_of(
    classes: Sequence[PieceClass], holders: Sequence[IntArray], fanouts: Sequence[Fanout]
) -> Streams:
    """Add up the pieces that take the same route."""
    max_slots = max((fanout.num_slots for fanout in fanouts), default=1)
    max_held = max((len(held) for held in holders), default=1)
    keys: list[IntArray] = []
    totals: list[IntArray] = []
    for group in classes:
        shape = np.broadcast_shapes(group.firsts.shape, group.slots.shape)
        route = group.fanouts * max_slots + group.slots
        key = (route * len(holders) + group.holders) * max_held + group.firsts
        repeats = len(group.names) // shape[0] if shape[0] else 0
        unique, inverse = np.unique(np.broadcast_to(key, shape), return_inverse=True)
        sums = np.zeros(len(unique), dtype=np.int64)
        weights = np.broadcast_to(group.piece_bytes() * repeats, shape)
        np.add.at(sums, inverse.ravel(), weights.ravel())
        keys.append(unique)
        totals.append(sums)
    none = np.zeros(0, dtype=np.int64)
    unique, inverse = np.unique(np.concatenate([none, *keys]), return_inverse=True)
    sums = np.zeros(len(unique), dtype=np.int64)
    np.add.at(sums, inverse.ravel(), np.concatenate([none, *totals]))
    rest, firsts = np.divmod(unique, max_held)
    routes, sets = np.divmod(rest, len(holders) or 1)
    found: list[Stream] = []
    for route in np.unique(routes).tolist():
        rows = np.flatnonzero(routes == route)
        fanout, slot = divmod(route, max_slots)
        found.append(
            Stream(
                route=route,
                receivers=fanouts[fanout].receivers,
                parents=fanouts[fanout].parents[slot],
                num_bytes=int(sums[rows].sum()),
                sources=_feeders(holders, sets[rows], firsts[rows], fanouts[fanout].num_feeds),
                source_bytes=sums[rows],
            )
        )
    return tuple(found)


def _feeders(
    holders: Sequence[IntArray], sets: IntArray, firsts: IntArray, num_feeds: int
) -> IntArray:
    """``[row, k]``: the k-th holder, from ``firsts[row]`` on, of set ``sets[row]``."""
    steps = np.arange(num_feeds)
    rows = [
        holders[index][(first + steps) % len(holders[index])]
        for index, first in zip(sets.tolist(), firsts.tolist(), strict=True)
    ]
    return np.array(rows, dtype=np.int64).reshape(len(sets), num_feeds)


def edge_bytes(streams: Streams, shape: tuple[int, int]) -> IntArray:
    """``[holders, receivers]`` bytes."""
    total = np.zeros(shape, dtype=np.int64)
    for stream in streams:
        is_known = stream.parents >= 0
        total[stream.parents[is_known], stream.receivers[is_known]] += stream.num_bytes
        fed = np.flatnonzero(~is_known)
        sources = stream.sources[:, -1 - stream.parents[fed]]
        receivers = np.broadcast_to(stream.receivers[fed], sources.shape)
        weights = np.broadcast_to(stream.source_bytes[:, None], sources.shape)
        np.add.at(total, (sources.ravel(), receivers.ravel()), weights.ravel())
    return total


def ports(
    sources: IntArray, receivers: IntArray, topology: Topology
) -> tuple[IntArray, IntArray, IntArray, tuple[str, ...]]:
    """Which link ends the edges use.

    Returns:
        For each edge the kind of its link, the port it leaves by and the port it arrives at; and
        the names of all ports. Both ports of an edge are busy for bytes over the bandwidth of its
        kind. A network card has a port out and one in, and so has a device for its host's links;
        copies on a device use that device only.
    """
    sites = topology.sites()
    destinations = receivers + len(topology.senders)
    kinds = sites.kinds(sources, destinations)
    num_devices = int(sites.devices.max(initial=-1)) + 1
    num_cards = int(sites.cards.max(initial=-1)) + 1
    of_device = (kinds >= 1).astype(np.int64)
    card_base = 3 * num_devices
    out = np.where(
        kinds <= 1,
        sites.devices[sources] + of_device * num_devices,
        card_base + sites.cards[sources],
    )
    into = np.where(
        kinds <= 1,
        sites.devices[destinations] + 2 * of_device * num_devices,
        card_base + num_cards + sites.cards[destinations],
    )
    return kinds, out, into, _port_names(topology, num_devices, num_cards)


def _port_names(topology: Topology, num_devices: int, num_cards: int) -> tuple[str, ...]:
    sites = topology.sites()
    places = (*topology.senders, *topology.receivers)
    devices, cards = [""] * num_devices, [""] * num_cards
    for place, device, card in zip(
        places, sites.devices.tolist(), sites.cards.tolist(), strict=True
    ):
        devices[device] = f"{place.host} device {place.device}"
        cards[card] = f"{place.host} rail {place.rail}"
    return (
        *(f"{name} copy" for name in devices),
        *(f"{name} out" for name in devices),
        *(f"{name} in" for name in devices),
        *(f"{name} out" for name in cards),
        *(f"{name} in" for name in cards),
    )


def link_usage(edges: IntArray, topology: Topology) -> LinkUsage:
    """How long `edge_bytes` keep each link busy; a copy on a device counts once."""
    sources, receivers = np.nonzero(edges)
    num_bytes = edges[sources, receivers]
    kinds, out, into, names = ports(sources, receivers, topology)
    speeds = np.array([link.bytes_per_s for link in topology.links.by_kind()])
    seconds = num_bytes / speeds[kinds]
    busy = np.bincount(out, weights=seconds, minlength=len(names))
    busy += np.bincount(into, weights=np.where(kinds == 0, 0.0, seconds), minlength=len(names))
    if not len(names):
        return LinkUsage(LINK_KINDS[0], 0.0, 0)
    busiest = int(busy.argmax())
    return LinkUsage(names[busiest], float(busy[busiest]), int(num_bytes[kinds >= 2].sum()))
