"""From matched cuts to routes: which sets of holders serve which sets of receivers, and how.

Sets of ranks are looked at once, however many tensors and pieces they share.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from cosmos_weightsync.balancing import Work
from cosmos_weightsync.layout import IntArray
from cosmos_weightsync.matching import Match, RankSets
from cosmos_weightsync.routing import Fanout, HostGroups, Shape
from cosmos_weightsync.shaping import CHUNK_BYTES, Demand, choose_shapes
from cosmos_weightsync.topology import Sites, Topology
from cosmos_weightsync.watching import Watch, unwatched, watched

__all__ = ["Draft", "RouteBuilder"]

SPLIT_BYTES = 1 << 20
"""A piece that can come in several ways is shared out between them in parts not smaller."""


@dataclass(frozen=True, eq=False, slots=True)
class Draft:
    """One class of tensors before it is known who sends what."""

    names: tuple[str, ...]
    item_bytes: int
    starts: IntArray
    stops: IntArray
    work: Work


class RouteBuilder:
    """Collects the sets of ranks that occur, then makes the routes; used once.

    Args:
        topology: Where the ranks are.
        watch: Told how far it is.
    """

    def __init__(self, topology: Topology, watch: Watch = unwatched) -> None:
        self._watch = watch
        self._topology = topology
        self._num_senders = len(topology.senders)
        self._sites = topology.sites()
        self._chunk_bytes = topology.chunk_bytes or CHUNK_BYTES[0]
        self._holders = _SetList()
        self._groups: list[HostGroups] = []
        self._group_index: dict[tuple[bytes, bytes], int] = {}
        sites, count = self._sites, self._num_senders
        self._is_disjoint = not np.isin(sites.hosts[:count], sites.hosts[count:]).any()

    @property
    def holders(self) -> RankSets:
        """The sets of holders seen so far."""
        return tuple(self._holders.sets)

    def draft(self, names: tuple[str, ...], item_bytes: int, match: Match) -> Draft:
        """Take in one class."""
        holders = np.array([self._holders.index(s) for s in match.holders], dtype=np.int64)
        sizes = match.numel() * item_bytes
        work = Work(len(names), sizes, holders[match.holder], self._routes(match))
        return Draft(names, item_bytes, match.starts, match.stops, work)

    def _routes(self, match: Match) -> IntArray:
        """For each piece the number of its receivers' group, new ones in order of their holders."""
        count = max(len(match.consumers), 1)
        unique, inverse = np.unique(match.holder * count + match.consumer, return_inverse=True)
        pairs = np.stack(np.divmod(unique, count), axis=1)
        if self._is_disjoint:  # Then it does not depend on the holders.
            _, first, which = np.unique(pairs[:, 1], return_index=True, return_inverse=True)
            order = np.argsort(first)
            pairs, inverse = pairs[first[order]], np.argsort(order)[which.ravel()][inverse.ravel()]
        found = [
            self._group(match.holders[held], match.consumers[wanted])
            for held, wanted in watched(pairs.tolist(), "grouping receivers", self._watch)
        ]
        return np.array(found, dtype=np.int64)[inverse.ravel()]

    def _group(self, held: IntArray, wanted: IntArray) -> int:
        """The number of the receivers ``wanted``, told apart by holders on their own hosts."""
        sites, local = self._sites, held[:0]
        hosts = sites.hosts[wanted + self._num_senders]
        if not self._is_disjoint:
            local = held[np.isin(sites.hosts[held], hosts)]
        key = (wanted.tobytes(), local.tobytes())
        if key not in self._group_index:
            self._group_index[key] = len(self._groups)
            if self._topology.relays == "never":
                hosts = _apart(hosts, sites.hosts[local], len(sites.hosts))
            self._groups.append(HostGroups(wanted, hosts, local, sites, self._num_senders))
        return self._group_index[key]

    def fanouts(self, drafts: Sequence[Draft]) -> tuple[Fanout, ...]:
        """The routes, at the positions that the drafts refer to."""
        counts = {group.num_remote for group in self._groups}
        chunk_bytes = self._topology.chunk_bytes
        if self._topology.relays == "never":
            shapes = {count: Shape(max(count, 1), 1) for count in counts}
            self._chunk_bytes = chunk_bytes or CHUNK_BYTES[0]
        else:
            shapes, self._chunk_bytes = choose_shapes(counts, self._demand(drafts), chunk_bytes)
        return tuple(
            group.route(shapes[group.num_remote])
            for group in watched(self._groups, "finding routes", self._watch)
        )

    @property
    def chunk_bytes(self) -> int:
        """What a relay has before it passes on; known once there are `fanouts`."""
        return self._chunk_bytes

    def _demand(self, drafts: Sequence[Draft]) -> Demand:
        """What the busiest sender and the busiest host move when every byte moves once."""
        sites, num_groups = self._sites, len(self._groups)
        is_remote = np.array([group.num_remote > 0 for group in self._groups], dtype=bool)
        into = np.zeros(int(sites.hosts.max(initial=-1)) + 1, dtype=np.int64)
        by_holder = np.zeros(len(self._holders.sets), dtype=np.int64)
        by_group = np.zeros(num_groups, dtype=np.int64)
        for work in (draft.work for draft in drafts):
            num_bytes = work.sizes * work.num_tensors
            leaves = is_remote[work.fanouts]
            np.add.at(by_holder, work.holders[leaves], num_bytes[leaves])
            np.add.at(by_group, work.fanouts, num_bytes)
        for group, size in zip(self._groups, by_group.tolist(), strict=True):
            into[group.remote_hosts] += size
        receive = int((into // np.maximum(_cards_per_host(sites), 1)).max(initial=0))
        link = self._topology.links.rail
        return Demand(send_bytes=self._least_sent(by_holder), receive_bytes=receive, link=link)

    def _least_sent(self, by_holder: IntArray) -> int:
        """Bytes over the busiest card if every set of holders shares its own out evenly."""
        by_cards: dict[bytes, int] = {}
        cards_of = self._sites.cards
        for held in np.flatnonzero(by_holder).tolist():
            key = np.unique(cards_of[self._holders.sets[held]]).tobytes()
            by_cards[key] = by_cards.get(key, 0) + int(by_holder[held])
        sets = [(np.frombuffer(key, dtype=np.int64), size) for key, size in by_cards.items()]
        if not sets:
            return 0
        every = np.unique(np.concatenate([cards for cards, _ in sets]))
        even = sum(size for _, size in sets) // len(every)
        return max(even, *(size // len(cards) for cards, size in sets))

    def split(self, draft: Draft, fanouts: Sequence[Fanout]) -> Draft:
        """Cut large pieces that can come in several ways, so that the ways share the work."""
        held = np.array([len(ranks) for ranks in self._holders.sets], dtype=np.int64)
        slots = np.array([fanout.num_slots for fanout in fanouts], dtype=np.int64)
        work = draft.work
        ways = np.maximum(held[work.holders], slots[work.fanouts])
        parts = np.maximum(1, np.minimum(ways, work.sizes // SPLIT_BYTES))
        if not len(parts) or int(parts.max()) == 1:
            return draft
        cuts = [
            _cut(draft.starts[row], draft.stops[row], count)
            for row, count in enumerate(parts.tolist())
        ]
        repeats = [len(low) for low, _ in cuts]
        starts = np.concatenate([low for low, _ in cuts])
        stops = np.concatenate([high for _, high in cuts])
        sizes = np.prod(stops - starts, axis=1, dtype=np.int64) * draft.item_bytes
        cut = Work(
            work.num_tensors,
            sizes,
            np.repeat(work.holders, repeats),
            np.repeat(work.fanouts, repeats),
        )
        return replace(draft, starts=starts, stops=stops, work=cut)


class _SetList:
    """Sets of ranks, numbered as they come."""

    def __init__(self) -> None:
        self.sets: list[IntArray] = []
        self._index: dict[bytes, int] = {}

    def index(self, ranks: IntArray) -> int:
        key = ranks.tobytes()
        if key not in self._index:
            self._index[key] = len(self.sets)
            self.sets.append(ranks)
        return self._index[key]


def _apart(hosts: IntArray, held: IntArray, first: int) -> IntArray:
    """The same hosts, but others, numbered from ``first``, for those not among ``held``."""
    is_alone = ~np.isin(hosts, held) if len(held) else np.ones(len(hosts), dtype=bool)
    return np.where(is_alone, first + np.cumsum(is_alone) - 1, hosts)


def _cards_per_host(sites: Sites) -> IntArray:
    counts = np.zeros(int(sites.hosts.max(initial=-1)) + 1, dtype=np.int64)
    _, where = np.unique(sites.cards, return_index=True)
    np.add.at(counts, sites.hosts[where], 1)
    return counts


def _cut(start: IntArray, stop: IntArray, count: int) -> tuple[IntArray, IntArray]:
    """Cut a box along its longest side into ``count`` nearly equal parts (fewer if too short)."""
    dim = int(np.argmax(stop - start)) if len(start) else 0
    count = min(count, int(stop[dim] - start[dim])) if len(start) else 1
    low, high = np.tile(start, (count, 1)), np.tile(stop, (count, 1))
    if count > 1:
        edges = start[dim] + (stop[dim] - start[dim]) * np.arange(count + 1) // count
        low[:, dim], high[:, dim] = edges[:-1], edges[1:]
    return low, high
