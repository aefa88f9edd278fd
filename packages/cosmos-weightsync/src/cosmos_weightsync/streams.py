"""A plan as flows of bytes: how much follows which route, and how busy that keeps every link."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cosmos_weightsync.layout import IntArray
from cosmos_weightsync.links import LINK_KINDS
from cosmos_weightsync.pieces import PieceClass
from cosmos_weightsync.routing import Fanout, HolderSets
from cosmos_weightsync.topology import Topology

__all__ = [
    "Edges",
    "LinkUsage",
    "Ports",
    "Stream",
    "Streams",
    "edges_of",
    "link_usage",
    "ports",
    "streams_of",
    "summed",
]


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
        num_pieces: In how many pieces they are.
        source_pieces: ``[n]``, the pieces of each set.
    """

    route: int
    receivers: IntArray
    parents: IntArray
    num_bytes: int
    sources: IntArray
    source_bytes: IntArray
    num_pieces: int
    source_pieces: IntArray


Streams = tuple[Stream, ...]

_PENDING = 1 << 22
"""So many deliveries are added up at once."""


@dataclass(frozen=True, eq=False, slots=True)
class Edges:
    """Every pair of a holder and a receiver between which bytes go, once, in their order.

    Attributes:
        sources: The holder of each.
        receivers: The receiver of each.
        num_bytes: How much goes there; more than nothing.
    """

    sources: IntArray
    receivers: IntArray
    num_bytes: IntArray


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
        weights = np.broadcast_to(group.piece_bytes() * repeats, shape)
        unique, sums = summed(
            np.broadcast_to(key, shape), np.stack([weights, np.full(shape, repeats)])
        )
        keys.append(unique)
        totals.append(sums)
    none = np.zeros(0, dtype=np.int64)
    unique, (sizes, counts) = summed(
        np.concatenate([none, *keys]), np.concatenate([none.reshape(2, 0), *totals], axis=1)
    )
    rest, firsts = np.divmod(unique, max_held)
    routes, sets = np.divmod(rest, len(holders) or 1)
    held = HolderSets(holders)
    found: list[Stream] = []
    ranges = np.stack(np.unique(routes, return_index=True, return_counts=True), axis=1)
    for route, begin, count in ranges.tolist():
        rows = slice(begin, begin + count)
        fanout, slot = divmod(route, max_slots)
        turn = firsts[rows, None] + np.arange(fanouts[fanout].num_feeds)
        found.append(
            Stream(
                route=route,
                receivers=fanouts[fanout].receivers,
                parents=fanouts[fanout].parents[slot],
                num_bytes=int(sizes[rows].sum()),
                sources=held.at(sets[rows, None], turn),
                source_bytes=sizes[rows],
                num_pieces=int(counts[rows].sum()),
                source_pieces=counts[rows],
            )
        )
    return tuple(found)


def summed(keys: IntArray, values: IntArray) -> tuple[IntArray, IntArray]:
    """The distinct keys, and ``values[i, ...]`` added up over equal keys for each i."""
    unique, inverse = np.unique(keys, return_inverse=True)
    sums = np.zeros((len(values), len(unique)), dtype=np.int64)
    for row, weights in zip(sums, values, strict=True):
        np.add.at(row, inverse.ravel(), weights.ravel())
    return unique, sums


def edges_of(streams: Streams, num_receivers: int) -> Edges:
    """Add up what goes between the same two."""
    keys: list[IntArray] = [np.zeros(0, dtype=np.int64)]
    sizes: list[IntArray] = [np.zeros(0, dtype=np.int64)]
    num_pending = num_known = 0
    for stream in streams:
        is_known = stream.parents >= 0
        fed = np.flatnonzero(~is_known)
        sources = stream.sources[:, -1 - stream.parents[fed]]
        known = stream.parents[is_known] * num_receivers + stream.receivers[is_known]
        keys += [known, (sources * num_receivers + stream.receivers[fed]).ravel()]
        sizes += [np.full(len(known), stream.num_bytes), np.repeat(stream.source_bytes, len(fed))]
        num_pending += len(known) + sources.size
        if num_pending > max(_PENDING, num_known):
            unique, sums = summed(np.concatenate(keys), np.concatenate(sizes)[None])
            keys, sizes, num_pending, num_known = [unique], [sums[0]], 0, len(unique)
    unique, sums = summed(np.concatenate(keys), np.concatenate(sizes)[None])
    moves = sums[0] > 0
    sources, receivers = np.divmod(unique[moves], num_receivers or 1)
    return Edges(sources, receivers, sums[0][moves])


@dataclass(frozen=True, eq=False, slots=True)
class Ports:
    """Which link ends some edges use.

    Both ends of an edge are busy for bytes over the bandwidth of its kind. A network card has a
    port out and one in, and so has a device for its host's links; copies on a device use that
    device only. What moves inside a host uses a port of the host besides, if there is a limit.

    Attributes:
        kinds: Of each edge, a position in `LINK_KINDS`.
        used: ``[3, n]`` ports: out, in, and that of the host; the last port of all is none.
        weights: ``[3, n]``: how much of each port an edge at full speed occupies.
        names: Of all ports but the last.
    """

    kinds: IntArray
    used: IntArray
    weights: npt.NDArray[np.float64]
    names: tuple[str, ...]


def ports(sources: IntArray, receivers: IntArray, topology: Topology) -> Ports:
    """Which link ends edges from holders to receivers use."""
    sites = topology.sites()
    destinations = receivers + len(topology.senders)
    kinds = sites.kinds(sources, destinations)
    num_devices = int(sites.devices.max(initial=-1)) + 1
    num_cards = int(sites.cards.max(initial=-1)) + 1
    names = _port_names(topology, num_devices, num_cards)
    of_device = (kinds >= 1).astype(np.int64)
    cards, hosts = 3 * num_devices, 3 * num_devices + 2 * num_cards
    is_inside, none = kinds <= 1, np.full(len(kinds), len(names))
    out = np.where(
        is_inside,
        sites.devices[sources] + of_device * num_devices,
        cards + sites.cards[sources],
    )
    into = np.where(
        is_inside,
        np.where(kinds == 0, none, sites.devices[destinations] + 2 * num_devices),
        cards + num_cards + sites.cards[destinations],
    )
    speeds = np.array([link.bytes_per_s for link in topology.links.by_kind()])[kinds]
    total = topology.links.host_total_bytes_per_s
    shared = np.where(is_inside & (total is not None), hosts + sites.hosts[destinations], none)
    used = np.stack([out, into, shared])
    weights = np.where(used == len(names), 0.0, 1.0)
    weights[2] *= speeds / (total or 1.0)
    return Ports(kinds, used, weights, names)


def _port_names(topology: Topology, num_devices: int, num_cards: int) -> tuple[str, ...]:
    sites = topology.sites()
    places = (*topology.senders, *topology.receivers)
    devices, cards = [""] * num_devices, [""] * num_cards
    hosts = [""] * (int(sites.hosts.max(initial=-1)) + 1)
    for place, host, device, card in zip(
        places, sites.hosts.tolist(), sites.devices.tolist(), sites.cards.tolist(), strict=True
    ):
        hosts[host] = place.host
        devices[device] = f"{place.host} device {place.device}"
        cards[card] = f"{place.host} rail {place.rail}"
    return (
        *(f"{name} copy" for name in devices),
        *(f"{name} out" for name in devices),
        *(f"{name} in" for name in devices),
        *(f"{name} out" for name in cards),
        *(f"{name} in" for name in cards),
        *(f"{name} all inside" for name in hosts),
    )


def link_usage(edges: Edges, topology: Topology) -> LinkUsage:
    """How long edges keep each link busy; a copy on a device counts once."""
    num_bytes = edges.num_bytes
    found = ports(edges.sources, edges.receivers, topology)
    speeds = np.array([link.bytes_per_s for link in topology.links.by_kind()])
    seconds = found.weights * (num_bytes / speeds[found.kinds])
    busy = np.bincount(found.used.ravel(), weights=seconds.ravel(), minlength=len(found.names) + 1)[
        :-1
    ]
    if not len(found.names):
        return LinkUsage(LINK_KINDS[0], 0.0, 0)
    busiest = int(busy.argmax())
    across = int(num_bytes[found.kinds >= 2].sum())
    return LinkUsage(found.names[busiest], float(busy[busiest]), across)
