"""What a plan is: for every piece of every tensor, where each receiver takes it from.

A plan of thousands of ranks stays small because it holds rules, not deliveries: a piece names a set
of holders, the routes from there to a set of receivers, and two small numbers that pick among the
holders and among the routes. The deliveries of one receiver are worked out when asked for.
"""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np

from cosmos_weightsync.bounds import Demands, lower_bound
from cosmos_weightsync.boxes import Box
from cosmos_weightsync.layout import IntArray
from cosmos_weightsync.pieces import Piece, PieceClass
from cosmos_weightsync.routing import Fanout, HolderSets
from cosmos_weightsync.streams import Edges, Streams, edges_of, link_usage, streams_of, summed
from cosmos_weightsync.topology import Topology

__all__ = ["PlanStats", "TransferPlan"]


@dataclass(frozen=True, slots=True)
class PlanStats:
    """How a plan loads the two sides and the links.

    Attributes:
        num_tensors: Tensors that are moved.
        num_pieces: Deliveries: pieces times their receivers.
        num_edges: Pairs of ranks between which anything moves.
        total_bytes: Bytes delivered.
        relayed_bytes: Those of them that come from a receiver that passes them on.
        cross_host_bytes: Those of them that cross from one host to another.
        max_sender_bytes: Of the busiest sender rank.
        max_receiver_bytes: Of the receiver rank that takes in most.
        imbalance: The busiest sender's bytes over the mean of all senders: 1 is perfect.
        busiest_link: Which link is busy longest.
        busiest_s: For how long, by the topology's bandwidths.
        bound_s: No plan can be faster, `TransferPlan.lower_bound`.
    """

    num_tensors: int
    num_pieces: int
    num_edges: int
    total_bytes: int
    relayed_bytes: int
    cross_host_bytes: int
    max_sender_bytes: int
    max_receiver_bytes: int
    imbalance: float
    busiest_link: str
    busiest_s: float
    bound_s: float

    @property
    def ratio(self) -> float:
        """The busiest link's time over the bound; 1 is perfect."""
        return self.busiest_s / self.bound_s if self.bound_s else 1.0


@dataclass(frozen=True, eq=False)
class TransferPlan:
    """Every receiver element exactly once, in an order that both sides know.

    Attributes:
        num_senders: Ranks on the sending side.
        num_receivers: Ranks on the receiving side.
        classes: The pieces, by class of tensors.
        holders: The sets of holders.
        fanouts: The routes.
        order: The receivers' tensor names in the order in which they travel.
        topology: What was planned with.
        chunk_bytes: What a relay has before it passes on, at most: messages are not longer.
    """

    num_senders: int
    num_receivers: int
    classes: tuple[PieceClass, ...]
    holders: tuple[IntArray, ...]
    fanouts: tuple[Fanout, ...]
    order: tuple[str, ...]
    topology: Topology
    chunk_bytes: int

    @property
    def num_holders(self) -> int:
        """Senders and receivers together."""
        return self.num_senders + self.num_receivers

    def pieces(self, *, source: int | None = None, receiver: int | None = None) -> list[Piece]:
        """All pieces, or those of one source, of one receiver, or of one edge; in travel order."""
        receivers = range(self.num_receivers) if receiver is None else (receiver,)
        found = [item for rank in receivers for item in self._deliveries(rank, source)]
        found.sort(key=lambda item: item[0])
        return [piece for _, piece in found]

    def sources_of(self, receiver: int) -> tuple[int, ...]:
        """The holders that a receiver takes anything from: senders first, then receivers."""
        found = {int(s) for group in self._routed(receiver) for s in np.unique(group.sources)}
        return tuple(sorted(found))

    def _deliveries(
        self, receiver: int, source: int | None
    ) -> Iterator[tuple[tuple[int, int, int, int], Piece]]:
        for routed in self._routed(receiver, source):
            group, num_bytes = routed.group, routed.group.piece_bytes()
            is_wanted = (
                np.ones(routed.sources.shape, dtype=bool)
                if source is None
                else routed.sources == source
            )
            boxes: dict[int, Box] = {}
            rows = np.broadcast_to(is_wanted, (len(group.names), len(routed.pieces)))
            repeated = len(routed.sources) == 1
            for tensor, column in np.argwhere(rows).tolist():
                piece = int(routed.pieces[column])
                if piece not in boxes:
                    low, high = group.starts[piece].tolist(), group.stops[piece].tolist()
                    boxes[piece] = Box(tuple(low), tuple(high))
                name = group.names[tensor]
                place = (self._position[name], routed.number, piece, receiver)
                origin = int(routed.sources[0 if repeated else tensor, column])
                yield place, Piece(name, boxes[piece], origin, receiver, int(num_bytes[piece]))

    def _routed(self, receiver: int, source: int | None = None) -> Iterator["_Routed"]:
        """For each class, the pieces that one receiver gets and where it takes them from.

        With a source, some pieces that cannot come from it are left out.
        """
        routes = self._routes_to(receiver)
        is_held = np.array([source is None or source in held for held in self.holders], dtype=bool)
        is_relay = np.array([index in routes for index in range(len(self.fanouts))], dtype=bool)
        is_fed = is_relay.copy()
        for index, parents in routes.items():
            is_fed[index] = bool((parents < 0).any())
            is_relay[index] = source is None or bool((parents == source).any())
        for number, group in enumerate(self.classes):
            is_candidate = is_relay[group.fanouts] | (
                is_fed[group.fanouts] & is_held[group.holders]
            )
            pieces = np.flatnonzero(is_candidate)
            if not len(pieces):
                continue
            slots = group.slots[:, pieces]
            codes = np.empty(slots.shape, dtype=np.int64)
            for fanout in np.unique(group.fanouts[pieces]).tolist():
                columns = np.flatnonzero(group.fanouts[pieces] == fanout)
                codes[:, columns] = routes[fanout][slots[:, columns]]
            firsts = group.firsts[:, pieces]
            sources = self.resolve(codes, firsts, group.holders[pieces])
            yield _Routed(number, group, pieces, sources)

    def _routes_to(self, receiver: int) -> dict[int, IntArray]:
        """By position of the routes that lead to a receiver: its parent for each slot."""
        found: dict[int, IntArray] = {}
        for index, fanout in enumerate(self.fanouts):
            at = int(np.searchsorted(fanout.receivers, receiver))
            if at < len(fanout.receivers) and fanout.receivers[at] == receiver:
                found[index] = fanout.parents[:, at]
        return found

    def resolve(self, codes: IntArray, firsts: IntArray, holders: IntArray) -> IntArray:
        """Turn the codes of `Fanout.parents` into holders' numbers.

        Args:
            codes: ``[tensors or 1, pieces]``.
            firsts: At which holder of its set each piece begins; ``[tensors or 1, pieces]``.
            holders: The set of holders of each piece.
        """
        return np.where(codes >= 0, codes, self._holder_sets.at(holders, firsts - 1 - codes))

    @cached_property
    def _position(self) -> dict[str, int]:
        return {name: index for index, name in enumerate(self.order)}

    @cached_property
    def _holder_sets(self) -> HolderSets:
        return HolderSets(self.holders)

    def edge_bytes(self) -> IntArray:
        """Bytes from each holder (row: senders, then receivers) to each receiver (column)."""
        edges, shape = self.edges(), (self.num_holders, self.num_receivers)
        table = np.zeros(shape, dtype=np.int64)
        table[edges.sources, edges.receivers] = edges.num_bytes
        return table

    def edges(self) -> Edges:
        """The pairs between which bytes go, without a table of all pairs there are."""
        return edges_of(self.streams(), self.num_receivers)

    def streams(self) -> Streams:
        """The plan as flows of bytes, without names and boxes."""
        return streams_of(self.classes, self.holders, self.fanouts)

    def lower_bound(self, *, relays: Literal["auto", "never"] | None = None) -> float:
        """Seconds below which no plan for these layouts and this topology can be.

        Args:
            relays: Whether receivers may pass on what they have; as the topology says by default.
        """
        with_relays = (relays or self.topology.relays) == "auto"
        return lower_bound(self._demands(), with_relays=with_relays)

    def _demands(self) -> Demands:
        none, count = np.zeros(0, dtype=np.int64), len(self.fanouts)
        keys = [group.holders * count + group.fanouts for group in self.classes]
        sizes = [group.piece_bytes() * len(group.names) for group in self.classes]
        unique, sums = summed(np.concatenate([none, *keys]), np.concatenate([none, *sizes])[None])
        held, fanouts = np.divmod(unique, count or 1)
        return Demands(
            num_senders=self.num_senders,
            held=[self.holders[index] for index in held.tolist()],
            wanted=[self.fanouts[index].receivers for index in fanouts.tolist()],
            num_bytes=sums[0],
            sites=self.topology.sites(),
            links=self.topology.links,
        )

    def stats(self) -> PlanStats:
        """Counts, loads and the bound."""
        edges = self.edges()
        by_holder = np.zeros(self.num_holders, dtype=np.int64)
        by_receiver = np.zeros(self.num_receivers, dtype=np.int64)
        np.add.at(by_holder, edges.sources, edges.num_bytes)
        np.add.at(by_receiver, edges.receivers, edges.num_bytes)
        by_sender = by_holder[: self.num_senders]
        total, sent = int(edges.num_bytes.sum()), int(by_sender.sum())
        mean = sent / self.num_senders if self.num_senders else 0.0
        usage = link_usage(edges, self.topology)
        return PlanStats(
            num_tensors=len(self.order),
            num_pieces=self._count_deliveries(),
            num_edges=len(edges.num_bytes),
            total_bytes=total,
            relayed_bytes=total - sent,
            cross_host_bytes=usage.cross_host_bytes,
            max_sender_bytes=int(by_sender.max(initial=0)),
            max_receiver_bytes=int(by_receiver.max(initial=0)),
            imbalance=float(by_sender.max(initial=0)) / mean if mean else 1.0,
            busiest_link=usage.busiest,
            busiest_s=usage.busiest_s,
            bound_s=self.lower_bound(),
        )

    def _count_deliveries(self) -> int:
        sizes = np.array([len(fanout.receivers) for fanout in self.fanouts], dtype=np.int64)
        return sum(len(g.names) * int(sizes[g.fanouts].sum()) for g in self.classes)

    def digest(self) -> str:
        """16 bytes in hex: two ranks with equal digests move the same bytes in the same order."""
        state = hashlib.blake2b(digest_size=16)
        state.update(json.dumps([self.num_senders, self.num_receivers, self.order]).encode())
        for group in self.classes:
            state.update(json.dumps([group.names, group.item_bytes]).encode())
            for array in (group.starts, group.stops, group.holders, group.fanouts):
                state.update(np.ascontiguousarray(array).tobytes())
            state.update(group.firsts.tobytes() + group.slots.tobytes())
        for held in self.holders:
            state.update(b"holders" + held.tobytes())
        for fanout in self.fanouts:
            state.update(b"routes" + fanout.receivers.tobytes() + fanout.parents.tobytes())
        return state.hexdigest()


@dataclass(frozen=True, eq=False, slots=True)
class _Routed:
    """Pieces of one class that one receiver gets; ``sources[t, i]`` is who sends ``pieces[i]``."""

    number: int
    group: PieceClass
    pieces: IntArray
    sources: IntArray
