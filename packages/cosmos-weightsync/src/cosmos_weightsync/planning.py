"""Which rank sends which box of which tensor to whom: a pure function of layouts and topology.

```
layouts ─► distinct pairs of cuts ─► pieces (matching) ─► routes of each set of receivers (routing)
        ─► who sends, and who is the entry of a host (balancing) ─► plan
```
Every rank of both sides computes the plan for itself and gets the same one, so no piece carries a
header on the wire; equal digests prove it.
"""

from collections.abc import Iterable, Iterator
from difflib import get_close_matches

import numpy as np

from cosmos_weightsync.balancing import Balancer
from cosmos_weightsync.errors import PlanError, UncoveredRegionError, UnknownTensorError
from cosmos_weightsync.layout import ITEM_BYTES, Geometry, IntArray, Layout
from cosmos_weightsync.matching import Match, Uncovered, match_geometries
from cosmos_weightsync.pieces import Piece, PieceClass
from cosmos_weightsync.planning_routes import Draft, RouteBuilder
from cosmos_weightsync.plans import PlanStats, TransferPlan
from cosmos_weightsync.topology import Topology
from cosmos_weightsync.watching import Watch, part_of, unwatched

__all__ = ["Piece", "PieceClass", "PlanStats", "TransferPlan", "nearest_name", "plan_transfer"]

_MAX_BYTES = 1 << 62


def plan_transfer(
    senders: Layout,
    receivers: Layout,
    topology: Topology | None = None,
    *,
    watch: Watch = unwatched,
) -> TransferPlan:
    """Decide who sends what to whom, and who passes it on.

    The same arguments give the same plan on every machine. Bytes travel in the senders' dtype.

    Args:
        senders: What the sending ranks hold, in the dtype that goes over the wire.
        receivers: What the receiving ranks want; it may be a part of the senders' tensors.
        topology: Where the ranks are. Without it, every receiver fetches from senders.
        watch: Called now and then with what is being done and which share of it is done, 0 to 1.

    Raises:
        UnknownTensorError: a wanted tensor is not offered, or with another global shape.
        UncoveredRegionError: a wanted region is not offered.
        TopologyError: the topology places another number of ranks.
        PlanError: more bytes are wanted than can be counted.
    """
    _check_countable(receivers)
    if topology is None:
        topology = Topology.separate(senders.num_ranks, receivers.num_ranks)
    topology.check_ranks(senders.num_ranks, receivers.num_ranks)
    builder = RouteBuilder(topology, watch)
    drafts = [
        builder.draft(names, item_bytes, match)
        for names, item_bytes, match in _matches(senders, receivers, watch)
    ]
    fanouts = builder.fanouts(drafts)
    drafts = [builder.split(draft, fanouts) for draft in drafts]
    balancer = Balancer(
        [draft.work for draft in drafts],
        holders=builder.holders,
        fanouts=fanouts,
        sites=topology.sites(),
        costs=topology.costs(),
        num_senders=senders.num_ranks,
    )
    firsts, slots = balancer.choose_holders(watch), balancer.choose_slots(watch)
    return TransferPlan(
        num_senders=senders.num_ranks,
        num_receivers=receivers.num_ranks,
        classes=tuple(map(_class, drafts, firsts, slots)),
        holders=builder.holders,
        fanouts=fanouts,
        order=tuple(receivers.tensors),
        topology=topology,
        chunk_bytes=builder.chunk_bytes,
    )


def _class(draft: Draft, firsts: IntArray, slots: IntArray) -> PieceClass:
    return PieceClass(
        names=draft.names,
        item_bytes=draft.item_bytes,
        starts=draft.starts,
        stops=draft.stops,
        holders=draft.work.holders,
        fanouts=draft.work.fanouts,
        firsts=firsts,
        slots=slots,
    )


def _check_countable(receivers: Layout) -> None:
    """Refuse sums of bytes that 64 bits do not hold: what is planned by them would be nonsense."""
    wanted = [
        float((cut.stops - cut.starts).prod(axis=1, dtype=np.float64).sum())
        for cut in receivers.geometries
    ]
    total = sum(ITEM_BYTES[e.dtype] * wanted[e.geometry] for e in receivers.tensors.values())
    if total > _MAX_BYTES:
        raise PlanError(
            f"{receivers.num_ranks} receivers want {total:.3g} bytes, of which no more than "
            f"{_MAX_BYTES:.3g} can be planned"
        )


def _matches(
    senders: Layout, receivers: Layout, watch: Watch
) -> Iterator[tuple[tuple[str, ...], int, Match]]:
    """Match every distinct pair of cuts, with the names of the tensors that are cut like that."""
    groups: dict[tuple[int, int, int], list[str]] = {}
    for name, entry in receivers.tensors.items():
        _check_offered(name, senders, receivers)
        offer = senders.tensors[name]
        key = (offer.geometry, entry.geometry, ITEM_BYTES[offer.dtype])
        groups.setdefault(key, []).append(name)
    for number, ((offered, wanted, item_bytes), names) in enumerate(groups.items()):
        match = match_geometries(
            senders.geometries[offered],
            receivers.geometries[wanted],
            part_of(watch, number, len(groups)),
        )
        if isinstance(match, Uncovered):
            raise _uncovered(names[0], match, senders.geometries[offered])
        yield tuple(names), item_bytes, match


def _check_offered(name: str, senders: Layout, receivers: Layout) -> None:
    if name not in senders.tensors:
        raise UnknownTensorError(
            f"{name}: {_first(name, receivers, 'receiver')} is wanted, no sender has it; they have "
            f"{len(senders.tensors)} tensors{nearest_name(name, senders.tensors)}"
        )
    have, want = senders.shape_of(name), receivers.shape_of(name)
    if have != want:
        raise UnknownTensorError(
            f"{name}: receivers want shape {want}, senders have {have}: "
            f"{_first(name, receivers, 'receiver')} against {_first(name, senders, 'sender')}"
        )


def _first(name: str, side: Layout, role: str) -> str:
    """The region of the first rank that has one."""
    cut = side.geometries[side.tensors[name].geometry]
    if not len(cut.ranks):
        return f"nothing of any {role}"
    rank = int(cut.ranks[0])
    return f"{cut.boxes_of(rank)[0]} of {role} {rank}"


def nearest_name(name: str, names: Iterable[str]) -> str:
    """The end of a sentence on a tensor that is not among others: which of these it may be."""
    known = list(names)
    for other in known:
        short, long = sorted((name, other), key=len)
        if long.endswith(f".{short}"):
            prefix = long.removesuffix(short)
            return (
                f", such as {other}; {prefix!r} is in front of one of the two only: "
                "describe the same part of the model at both ends, or rename it by "
                "'converted_shards'"
            )
    alike = get_close_matches(name, known, n=1, cutoff=0.0)
    return f", such as {alike[0]}" if alike else ""


def _uncovered(name: str, match: Uncovered, senders: Geometry) -> UncoveredRegionError:
    offers = ", ".join(str(box) for box in match.offered[:4])
    more = f" and {len(match.offered) - 4} more" if len(match.offered) > 4 else ""
    return UncoveredRegionError(
        f"{name} {senders.shape}: receiver {match.receiver} needs {match.wanted}, of which "
        f"{match.missing} is not offered; senders offer {offers or 'nothing'}{more}"
    )
