"""A plan for a whole group of receivers, as each of them makes it for itself.

All receivers of the group come to the same plan. One that knows of others than the rest does comes
to another; what it then asks of a relay in vain it gets elsewhere. When a relay dies, those it fed
take the rest from where it took it: up the same forest, so nobody ever waits for somebody who waits
for them.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace

from cosmos_weightsync.boxes import subtract_all
from cosmos_weightsync.errors import UncoveredRegionError
from cosmos_weightsync.layout import Layout, ShardSpec
from cosmos_weightsync.links import Links
from cosmos_weightsync.planning import Piece, plan_transfer
from cosmos_weightsync.replanning import replan_without
from cosmos_weightsync.staging import Source
from cosmos_weightsync.topology import Topology

__all__ = ["JointPlan"]


class JointPlan:
    """What one receiver of a group takes from whom.

    Args:
        senders: All of them, by rank.
        receivers: All of the group, in an order that all know.
        me: Which of them this is.
        links: How fast the links between them are.

    Raises:
        PlanError: the senders do not have what is wanted.
    """

    def __init__(
        self, senders: Sequence[Source], receivers: Sequence[Source], me: int, links: Links
    ) -> None:
        self._holders = (*senders, *receivers)
        self._me = me
        self._offered = Layout.merge([source.layout for source in senders])
        topology = Topology.from_hosts(
            [source.host for source in senders], [source.host for source in receivers], links=links
        )
        wanted = Layout.merge([source.layout for source in receivers])
        self._plan = plan_transfer(self._offered, wanted, topology)
        number = len(senders) + me
        self._passes_on = any(bool((f.parents == number).any()) for f in self._plan.fanouts)

    @property
    def chunk_bytes(self) -> int | None:
        """What a relay of the plan has before it passes on; ``None`` if there is no relay."""
        plan = self._plan
        has_relays = any(bool((f.parents >= plan.num_senders).any()) for f in plan.fanouts)
        return plan.chunk_bytes if has_relays else None

    def shares(self) -> list[tuple[Source, Layout]]:
        """All that this receiver wants, by whom it takes it from.

        Senders come first, then relays elsewhere, then those on its own host, which wait for it.
        What this receiver passes on is in pieces of `chunk_bytes` at most, since over transports
        that read memory a piece arrives as a whole.
        """
        found = _by_source(
            (self._holders[piece.source], spec)
            for piece in self._plan.pieces(receiver=self._me)
            for spec in self._parts(piece)
        )
        here = self._holders[len(self._holders) - self._plan.num_receivers + self._me].host
        return sorted(found, key=lambda item: (item[0].role == "receiver", item[0].host == here))

    def instead_of(
        self, gone: Collection[str], specs: Iterable[ShardSpec]
    ) -> list[tuple[Source, Layout]]:
        """Some regions, by whom this receiver takes them from without those who are gone.

        Args:
            gone: Endpoints.
            specs: The regions.

        Raises:
            UncoveredRegionError: nobody who is left has one of them.
        """
        dead = [number for number, s in enumerate(self._holders) if s.endpoint in gone]
        pieces = replan_without(self._plan, dead).pieces(receiver=self._me)
        by_name: dict[str, list[ShardSpec]] = {}
        for spec in specs:
            by_name.setdefault(spec.name, []).append(spec)
        parts: list[tuple[Source, ShardSpec]] = []
        for piece in pieces:
            for spec in by_name.get(piece.name, ()):
                shared = spec.box.intersect(piece.box)
                if shared is not None:
                    parts.append((self._holders[piece.source], replace(spec, box=shared)))
        for name, wanted in by_name.items():
            found = [part.box for _, part in parts if part.name == name]
            for spec in wanted:
                if subtract_all(spec.box, found):
                    raise UncoveredRegionError(f"{name} {spec.box}: in nobody's part of the plan")
        return _by_source(parts)

    def _parts(self, piece: Piece) -> Iterator[ShardSpec]:
        entry = self._offered.tensors[piece.name]
        most = piece.box.numel
        if self._passes_on:
            most = max(1, self._plan.chunk_bytes // (piece.num_bytes // piece.box.numel))
        for box in piece.box.split(most):
            yield ShardSpec(piece.name, self._offered.shape_of(piece.name), box, entry.dtype)


def _by_source(parts: Iterable[tuple[Source, ShardSpec]]) -> list[tuple[Source, Layout]]:
    found: dict[Source, list[ShardSpec]] = {}
    for source, spec in parts:
        found.setdefault(source, []).append(spec)
    return [(source, Layout.from_ranks([specs])) for source, specs in found.items()]
