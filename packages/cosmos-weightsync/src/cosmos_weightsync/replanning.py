"""What becomes of a plan when ranks die, and how newcomers catch up: pure functions.

A dead receiver leaves the plan; those it passed bytes on to take them from where it took them. What
a dead sender was to send comes from another rank that holds it. Pieces keep their boxes, and all
that did not come from the dead keeps its source, so what has arrived stays good.
"""

from collections.abc import Collection
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from cosmos_weightsync.boxes import Box
from cosmos_weightsync.errors import UncoveredRegionError
from cosmos_weightsync.layout import Geometry, IntArray, Layout
from cosmos_weightsync.pieces import PieceClass
from cosmos_weightsync.planning import plan_transfer
from cosmos_weightsync.plans import TransferPlan
from cosmos_weightsync.routing import Fanout
from cosmos_weightsync.topology import Topology

__all__ = ["holders_layout", "plan_join", "replan_living", "replan_without"]

_Mask = npt.NDArray[np.bool_]


def replan_without(
    plan: TransferPlan, dead: Collection[int], *, committed: Collection[int] = ()
) -> TransferPlan:
    """The same transfer without some of its ranks.

    Args:
        plan: What was under way.
        dead: Holders that are gone: sender ranks, and ``num_senders + r`` for receiver rank r.
        committed: Receiver ranks that have the whole version. They need nothing more, and where no
            sender is left that holds a piece, those of them that wanted it send it.

    Raises:
        UncoveredRegionError: somebody still wants a piece that no living rank has; it names one
            such tensor and region, and who wants it.
    """
    after, uncovered = replan_living(plan, dead, committed)
    if uncovered:
        raise UncoveredRegionError(uncovered[0])
    return after


def replan_living(
    plan: TransferPlan, dead: Collection[int], committed: Collection[int]
) -> tuple[TransferPlan, list[str]]:
    """As `replan_without`, for all that the living have.

    Returns:
        The plan, in which pieces that no living rank has keep their dead holders; and what these
        pieces are.
    """
    gone = np.zeros(plan.num_holders, dtype=bool)
    gone[list(dead)] = True
    done = np.zeros(plan.num_holders, dtype=bool)
    done[[plan.num_senders + rank for rank in committed]] = True
    done &= ~gone
    fanouts = [_without(fanout, gone, done, plan.num_senders) for fanout in plan.fanouts]
    sets = _HolderSets(plan, gone, done)
    uncovered: list[str] = []
    classes = tuple(_resettle(group, fanouts, sets, uncovered) for group in plan.classes)
    after = replace(plan, classes=classes, holders=tuple(sets.sets), fanouts=tuple(fanouts))
    return after, uncovered


def _without(fanout: Fanout, gone: _Mask, done: _Mask, num_senders: int) -> Fanout:
    """The routes to those who live and are not done; the children of a dead relay move up."""
    receivers, parents = fanout.receivers, fanout.parents.copy()
    for _ in range(len(receivers)):
        is_lost = (parents >= 0) & gone[np.maximum(parents, 0)]
        if not is_lost.any():
            break
        slots, columns = np.nonzero(is_lost)
        relays = parents[slots, columns] - num_senders
        above = fanout.parents[slots, np.searchsorted(receivers, np.maximum(relays, receivers[0]))]
        # A dead sender on the receiver's own host: any other holder will do.
        parents[slots, columns] = np.where(relays >= 0, above, -1)
    kept = ~(gone | done)[receivers + num_senders]
    return Fanout(
        receivers=receivers[kept],
        parents=parents[:, kept],
        num_feeds=max(fanout.num_feeds, 1),
        entries=fanout.entries,
    )


class _HolderSets:
    """The plan's sets of holders without the dead; positions stay, sets may be added."""

    def __init__(self, plan: TransferPlan, gone: _Mask, done: _Mask) -> None:
        self._plan = plan
        self._done = done
        self._added: dict[int, int] = {}
        self.lives = [~gone[held] for held in plan.holders]
        self.sets: list[IntArray] = [
            _stand_in(held, alive) for held, alive in zip(plan.holders, self.lives, strict=True)
        ]

    def of_committed(self, fanout: int) -> int | None:
        """The set of committed receivers that wanted what goes along these routes, if any."""
        if fanout not in self._added:
            places = self._plan.fanouts[fanout].receivers + self._plan.num_senders
            places = places[self._done[places]]
            if not len(places):
                return None
            self._added[fanout] = len(self.sets)
            self.sets.append(places)
            self.lives.append(np.ones(len(places), dtype=bool))
        return self._added[fanout]


def _stand_in(held: IntArray, alive: _Mask) -> IntArray:
    """The living of a set in their places, and one of them in the place of each of the dead."""
    if alive.all() or not alive.any():
        return held
    living = held[alive]
    return np.where(alive, held, living[np.cumsum(~alive) % len(living)])


def _resettle(
    group: PieceClass, fanouts: list[Fanout], sets: _HolderSets, uncovered: list[str]
) -> PieceClass:
    """Begin each piece that began at a dead holder at a living one, all of these in turn."""
    holders, firsts = group.holders.copy(), group.firsts.copy()
    hurt = np.array([not alive.all() for alive in sets.lives], dtype=bool)[holders]
    turn = 0
    for piece in np.flatnonzero(hurt).tolist():
        alive = sets.lives[holders[piece]]
        column = firsts[:, piece]
        if alive.any():
            is_lost = ~alive[column]
            living = np.flatnonzero(alive)
            column[is_lost] = living[(turn + np.arange(is_lost.sum())) % len(living)]
            turn += int(is_lost.sum())
            continue
        fanout = int(group.fanouts[piece])
        wanting = fanouts[fanout]
        if not (wanting.parents < 0).any():
            continue  # Whoever still wants it has it from a relay that is done.
        saved = sets.of_committed(fanout)
        if saved is None:
            box = Box(tuple(group.starts[piece].tolist()), tuple(group.stops[piece].tolist()))
            uncovered.append(
                f"{group.names[0]}: nobody alive has {box}, which receivers "
                f"{wanting.receivers[:8].tolist()} want; holders "
                f"{sets.sets[holders[piece]][:8].tolist()} are dead"
            )
            continue
        holders[piece] = saved
        column[:] = (turn + np.arange(len(column))) % len(sets.sets[saved])
        turn += len(column)
    return replace(group, holders=holders, firsts=firsts)


def holders_layout(senders: Layout, receivers: Layout, holders: Collection[int]) -> Layout:
    """One side made of all ranks that can serve: sender ranks, then receiver ranks.

    Args:
        senders: The sending side.
        receivers: The receiving side; what its ranks hold is in the senders' dtypes.
        holders: Who can serve, as sender ranks and ``num_senders + r``; the others hold nothing.
    """
    chosen = np.zeros(senders.num_ranks + receivers.num_ranks, dtype=bool)
    chosen[list(holders)] = True
    known: dict[tuple[int, int | None], int] = {}
    geometries: list[Geometry] = []
    tensors = dict(senders.tensors)
    for name, entry in senders.tensors.items():
        wanted = receivers.tensors.get(name)
        key = (entry.geometry, None if wanted is None else wanted.geometry)
        if key not in known:
            known[key] = len(geometries)
            parts = [(senders.geometries[entry.geometry], 0)]
            if wanted is not None:
                parts.append((receivers.geometries[wanted.geometry], senders.num_ranks))
            geometries.append(_stacked(parts, chosen))
        tensors[name] = replace(entry, geometry=known[key])
    return Layout(len(chosen), tensors, tuple(geometries))


def _stacked(parts: list[tuple[Geometry, int]], chosen: _Mask) -> Geometry:
    ranks = np.concatenate([geometry.ranks + offset for geometry, offset in parts])
    starts = np.concatenate([geometry.starts for geometry, _ in parts])
    stops = np.concatenate([geometry.stops for geometry, _ in parts])
    kept = chosen[ranks]
    return Geometry(parts[0][0].shape, ranks[kept], starts[kept], stops[kept])


def plan_join(
    sides: tuple[Layout, Layout],
    newcomers: Layout,
    holders: Collection[int],
    topology: Topology | None = None,
) -> TransferPlan:
    """Bring newcomers up to a version that some ranks have, while the others go on.

    Args:
        sides: The senders' and the receivers' layouts.
        newcomers: What the newcomers want, cut as they like.
        holders: Who has the version: sender ranks, and ``num_senders + r`` for receivers that have
            committed it.
        topology: Its ``senders`` are all holders, senders then receivers; its ``receivers`` are the
            newcomers.

    Returns:
        A plan whose ``num_senders`` are all holders, dead ones included, so sources are numbered as
        in the plan of the two sides.
    """
    return plan_transfer(holders_layout(*sides, holders), newcomers, topology)
