"""How large a plan would be, from the counts of boxes and their edges alone, before it is made.

An estimate: exact for cuts into a grid without overlaps, of other cuts rather more than there will
be. Where receivers pass on what they have, each takes it from few others; how many hosts are fed by
senders is guessed as the plan itself would. What a machine has is for the caller to say.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from cosmos_weightsync.errors import PlanTooLargeError
from cosmos_weightsync.layout import ITEM_BYTES, Geometry, IntArray, Layout
from cosmos_weightsync.matching import MAX_CELLS_PER_BOX
from cosmos_weightsync.planning_routes import SPLIT_BYTES
from cosmos_weightsync.shaping import CHUNK_BYTES, Demand, guesses
from cosmos_weightsync.topology import Sites, Topology

__all__ = ["PlanSize", "check_fits", "plan_size"]

# Bytes that planning and the figures of a plan take at their peak, measured, and rounded up.
_BYTES_PER_PIECE = 500
_BYTES_PER_GROUP = 3000
_BYTES_PER_EDGE = 200
_BYTES_PER_FLOW = 1000
_BYTES_PER_CHOICE = 100
_BYTES_PER_RANK = 1000


@dataclass(frozen=True, slots=True)
class PlanSize:
    """What a plan would come to.

    Attributes:
        num_pieces: Deliveries, as `PlanStats.num_pieces` counts them.
        num_edges: Pairs of ranks between which anything moves, at most.
        num_bytes: Of memory, while it is made and looked at.
    """

    num_pieces: int
    num_edges: int
    num_bytes: int

    @property
    def simulated_bytes(self) -> int:
        """Of memory, if it is simulated as well."""
        return self.num_bytes + self.num_edges * _BYTES_PER_FLOW


@dataclass(frozen=True, eq=False, slots=True)
class _Cut:
    """A geometry as counts.

    Attributes:
        starts: Of its distinct boxes.
        stops: Of its distinct boxes.
        copies: How many ranks hold each of them, rounded up.
        hosts: On how many hosts these are, at most.
        neighbours: How many of them are on one host, at most.
        volume: Elements of all of them together.
        overlaps: Whether some surely share an element.
        ranks: Equal for cuts over the same ranks, and only for those.
    """

    starts: IntArray
    stops: IntArray
    copies: int
    hosts: int
    neighbours: int
    volume: float
    overlaps: bool
    ranks: bytes

    @classmethod
    def of(cls, geometry: Geometry, host_of: IntArray) -> "_Cut":
        """From the boxes, and on which host each rank is."""
        ndim = len(geometry.shape)
        corners = np.concatenate([geometry.starts, geometry.stops], axis=1)
        which = np.zeros(len(corners), dtype=np.int64)
        distinct = corners[:1]
        if ndim:
            distinct, inverse = np.unique(corners, axis=0, return_inverse=True)
            which = inverse.ravel()
        starts, stops = distinct[:, :ndim], distinct[:, ndim:]
        volume = float(np.prod(stops - starts, axis=1, dtype=np.float64).sum())
        copies = -(-len(corners) // max(len(distinct), 1))
        places = which * (int(host_of.max(initial=0)) + 1) + host_of[geometry.ranks]
        held, neighbours = np.unique(places, return_counts=True)
        hosts = np.bincount(held // (int(host_of.max(initial=0)) + 1))
        return cls(
            starts=starts,
            stops=stops,
            copies=copies,
            hosts=int(hosts.max(initial=0)),
            neighbours=int(neighbours.max(initial=1)),
            volume=volume,
            overlaps=volume > math.prod(geometry.shape),
            ranks=np.unique(geometry.ranks).tobytes(),
        )


def plan_size(senders: Layout, receivers: Layout, topology: Topology | None = None) -> PlanSize:
    """How large the plan between two layouts would be; tensors that do not fit are left out."""
    ranks = senders.num_ranks, receivers.num_ranks
    if topology is None:
        topology = Topology.separate(*ranks)
    sites = topology.sites()
    cuts = [_Cut.of(geometry, sites.hosts) for geometry in senders.geometries]
    wants = [_Cut.of(geometry, sites.hosts[ranks[0] :]) for geometry in receivers.geometries]
    if topology.relays == "never":
        wants = [replace(want, neighbours=1) for want in wants]
    pairs = _pairs_of_cuts(senders, receivers)
    feeds = _num_fed(wants, pairs, topology, sites)
    num_rails = len(np.unique(sites.rails[: ranks[0]]))
    num_pieces, num_relayed = 0, 0
    edges: dict[tuple[bytes, bytes], int] = {}  # Cuts over the same ranks have most in common.
    num_bytes = sum(ranks) * _BYTES_PER_RANK
    for (offered, wanted), items in pairs.items():
        cut, want = cuts[offered], wants[wanted]
        num_rows = _num_matches(cut, want)
        ways = max(cut.copies, min(want.copies, want.neighbours))
        mean_bytes = want.volume * max(items) / max(num_rows, 1)
        # What one sender alone has goes to the entries on its rail.
        on_rail = cut.copies == 1 and num_rails >= want.neighbours
        fed = min(want.copies, feeds * (1 if on_rail else want.neighbours))
        key = cut.ranks, want.ranks
        edges[key] = max(edges.get(key, 0), num_rows * fed * cut.copies)
        if fed < want.copies:  # Each takes it from an entry on its host, or is one itself.
            num_relayed = max(num_relayed, len(want.starts) * want.copies * want.neighbours)
        num_rows *= max(1, min(ways, int(mean_bytes) // SPLIT_BYTES))
        num_pieces += num_rows * want.copies * len(items)
        num_bytes += num_rows * _BYTES_PER_PIECE + len(want.starts) * _BYTES_PER_GROUP
        num_bytes += num_rows * len(items) * _BYTES_PER_CHOICE if ways > 1 else 0
    num_edges = min(sum(edges.values()) + num_relayed, sum(ranks) * ranks[1])
    return PlanSize(num_pieces, num_edges, num_bytes + num_edges * _BYTES_PER_EDGE)


def _num_fed(
    wants: Sequence[_Cut],
    pairs: dict[tuple[int, int], list[int]],
    topology: Topology,
    sites: Sites,
) -> int:
    """How many of the hosts that want something are fed by senders; the others are by these."""
    most_hosts = max((want.hosts for want in wants), default=0)
    if topology.relays == "never" or most_hosts <= 1:
        return max((want.copies for want in wants), default=1)
    cards = sites.cards[: len(topology.senders)], sites.cards[len(topology.senders) :]
    sent, received = 0.0, 0.0  # If every byte leaves once, and enters every host once.
    for (_, wanted), items in pairs.items():
        num_bytes = wants[wanted].volume * sum(items)
        sent += num_bytes / len(np.unique(cards[0]))
        received += num_bytes * wants[wanted].hosts / len(np.unique(cards[1]))
    link = topology.links.rail
    demand = Demand(send_bytes=int(sent), receive_bytes=max(int(received), 1), link=link)
    sizes = CHUNK_BYTES if topology.chunk_bytes is None else (topology.chunk_bytes,)
    return guesses(most_hosts, demand, sizes)[0].shape.feeds


def _pairs_of_cuts(senders: Layout, receivers: Layout) -> dict[tuple[int, int], list[int]]:
    """The cuts of both sides that meet, and of each of their tensors the bytes of an element."""
    found: dict[tuple[int, int], list[int]] = {}
    for name, entry in receivers.tensors.items():
        offer = senders.tensors.get(name)
        if offer is not None and senders.shape_of(name) == receivers.shape_of(name):
            key = (offer.geometry, entry.geometry)
            found.setdefault(key, []).append(ITEM_BYTES[offer.dtype])
    return found


def _num_matches(offered: _Cut, wanted: _Cut) -> int:
    """How many boxes there are that a box of both sides has in common, at most."""
    dims = range(offered.starts.shape[1])
    most = len(offered.starts) * len(wanted.starts)
    for dim in dims:
        first = np.searchsorted(np.sort(offered.stops[:, dim]), wanted.starts[:, dim], "right")
        last = np.searchsorted(np.sort(offered.starts[:, dim]), wanted.stops[:, dim], "left")
        most = min(most, int((last - first).sum()))
    if offered.overlaps or wanted.overlaps:
        most *= MAX_CELLS_PER_BOX
    corners = (offered.starts, offered.stops, wanted.starts, wanted.stops)
    return min(most, _num_cells([[side[:, dim] for side in corners] for dim in dims]))


def _num_cells(edges: Sequence[Sequence[IntArray]]) -> int:
    """Into how many parts all edges together cut a tensor."""
    num_cells = 1
    for sides in edges:
        num_cells *= max(len(np.unique(np.concatenate(sides))) - 1, 0)
    return num_cells


def check_fits(num_pieces: int, num_bytes: int, available_bytes: int | None) -> None:
    """Refuse a plan that does not fit into the memory there is; ``None`` if nobody knows.

    Raises:
        PlanTooLargeError: it does not.
    """
    if available_bytes is not None and num_bytes > available_bytes:
        raise PlanTooLargeError(
            f"a plan of about {num_pieces:,} pieces takes about {_gigabytes(num_bytes)} of memory, "
            f"of which {_gigabytes(available_bytes)} are available: plan for fewer ranks or "
            "replicas, or cut both sides along the same dim"
        )


def _gigabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:,.1f} GB"
