"""How large a plan would be, from the counts of boxes and their edges alone, before it is made.

An estimate: exact for cuts into a grid without overlaps, of other cuts rather more than there will
be. What a machine has is for the caller to say.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cosmos_weightsync.errors import PlanTooLargeError
from cosmos_weightsync.layout import ITEM_BYTES, Geometry, IntArray, Layout
from cosmos_weightsync.matching import MAX_CELLS_PER_BOX
from cosmos_weightsync.planning_routes import SPLIT_BYTES
from cosmos_weightsync.topology import Topology

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
        volume: Elements of all of them together.
        overlaps: Whether some surely share an element.
    """

    starts: IntArray
    stops: IntArray
    copies: int
    volume: float
    overlaps: bool

    @classmethod
    def of(cls, geometry: Geometry) -> "_Cut":
        ndim = len(geometry.shape)
        corners = np.concatenate([geometry.starts, geometry.stops], axis=1)
        distinct = np.unique(corners, axis=0) if ndim else corners[:1]
        starts, stops = distinct[:, :ndim], distinct[:, ndim:]
        volume = float(np.prod(stops - starts, axis=1, dtype=np.float64).sum())
        copies = -(-len(corners) // max(len(distinct), 1))
        return cls(starts, stops, copies, volume, volume > math.prod(geometry.shape))


def plan_size(senders: Layout, receivers: Layout, topology: Topology | None = None) -> PlanSize:
    """How large the plan between two layouts would be; tensors that do not fit are left out."""
    cuts = [_Cut.of(geometry) for geometry in senders.geometries]
    wants = [_Cut.of(geometry) for geometry in receivers.geometries]
    most_slots = 1 if topology is None else _most_slots(topology)
    num_pieces, num_edges = 0, 0
    num_bytes = (senders.num_ranks + receivers.num_ranks) * _BYTES_PER_RANK
    for (offered, wanted), items in _pairs_of_cuts(senders, receivers).items():
        cut, want = cuts[offered], wants[wanted]
        num_rows = _num_matches(cut, want)
        ways = max(cut.copies, min(want.copies, most_slots))
        mean_bytes = want.volume * max(items) / max(num_rows, 1)
        num_edges += num_rows * want.copies * cut.copies
        num_rows *= max(1, min(ways, int(mean_bytes) // SPLIT_BYTES))
        num_pieces += num_rows * want.copies * len(items)
        num_bytes += num_rows * _BYTES_PER_PIECE + len(want.starts) * _BYTES_PER_GROUP
        num_bytes += num_rows * len(items) * _BYTES_PER_CHOICE if ways > 1 else 0
    num_edges = min(num_edges, (senders.num_ranks + receivers.num_ranks) * receivers.num_ranks)
    return PlanSize(num_pieces, num_edges, num_bytes + num_edges * _BYTES_PER_EDGE)


def _pairs_of_cuts(senders: Layout, receivers: Layout) -> dict[tuple[int, int], list[int]]:
    """The cuts of both sides that meet, and of each of their tensors the bytes of an element."""
    found: dict[tuple[int, int], list[int]] = {}
    for name, entry in receivers.tensors.items():
        offer = senders.tensors.get(name)
        if offer is not None and senders.shape_of(name) == receivers.shape_of(name):
            key = (offer.geometry, entry.geometry)
            found.setdefault(key, []).append(ITEM_BYTES[offer.dtype])
    return found


def _most_slots(topology: Topology) -> int:
    """How many receivers of a host can take turns in passing on, at most."""
    if topology.relays == "never":
        return 1
    return max(Counter(place.host for place in topology.receivers).values(), default=1)


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
