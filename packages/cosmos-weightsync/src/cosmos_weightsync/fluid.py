"""Flows of bytes through ports of limited capacity, moved on from event to event.

A *flow* is what one rank takes from another of one stream of a plan. It occupies the port where it
leaves, the port where it arrives and perhaps one that its host shares; flows share a port evenly,
and a flow that is slower elsewhere leaves its share to the others (max-min fairness). A flow out of
a relay begins when the relay has one chunk of the stream, stays one chunk behind, and so is never
faster than the relay is fed until the relay has everything.

A step costs a few passes over the flows that are under way, and shares out again only those ports
that are concerned; a fraction of a percent of the time so far counts as the same moment: thousands
of steps for any number of flows, where all end at different times.
"""

from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from cosmos_weightsync.layout import IntArray
from cosmos_weightsync.watching import Watch, unwatched

__all__ = ["NO_NODE", "FairRates", "FloatArray", "Flows", "Fluid", "Mask"]

FloatArray = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]
NO_NODE = -1

_SLACK = 1e-9
_HALF = 0.5
_MERGED = 5e-4
_COMPACT = 0.7
_TOLD_EVERY = 16


@dataclass(frozen=True, eq=False, slots=True)
class Flows:
    """Row i is one flow.

    A *node* is one stream at one receiver; what a node has, flows out of it can pass on.

    Attributes:
        nodes: Which node each flow feeds.
        upstream: Which node it takes from, `NO_NODE` if from somebody who has everything.
        sources: The holder it comes from.
        receivers: The receiver rank it goes to.
        sizes: Its bytes, and what its pieces cost in bytes that could have moved meanwhile.
        overheads: The share of the latter in the former.
        ports: ``[3, n]``: where it leaves and arrives, and what all flows inside its host share;
            the last port of all is that of flows that have no such.
        weights: ``[3, n]``: how much of each port one at full speed occupies.
        speeds: Bytes per second of a flow that is alone.
        limits: Bytes per second that it does not exceed, infinite for none.
        latencies: Seconds before its first byte.
    """

    nodes: IntArray
    upstream: IntArray
    sources: IntArray
    receivers: IntArray
    sizes: FloatArray
    overheads: FloatArray
    ports: IntArray
    weights: FloatArray
    speeds: FloatArray
    limits: FloatArray
    latencies: FloatArray

    def keys(self) -> list[tuple[int, int]]:
        """Who feeds which node: equal for the same flow in two plans for the same transfer."""
        return list(zip(self.nodes.tolist(), self.sources.tolist(), strict=True))

    def take(self, rows: IntArray) -> "Flows":
        """Some of them."""
        return Flows(*(getattr(self, item.name)[..., rows] for item in fields(self)))

    def joined(self, others: "Flows") -> "Flows":
        """These, then the others."""
        pairs = ((getattr(self, i.name), getattr(others, i.name)) for i in fields(self))
        return Flows(*(np.concatenate(pair, axis=-1) for pair in pairs))


class FairRates:
    """The rates of the same flows at one moment after the other.

    Flows that have no port in common, nor with others between them, share nothing: those that are
    concerned by no change since the moment before keep their rates.

    Args:
        flows: The flows, with nodes numbered from 0.
    """

    def __init__(self, flows: Flows) -> None:
        self._flows = flows
        self._num_ports = int(flows.ports.max(initial=0)) + 1
        self._groups = _connected(flows, self._num_ports)
        self._filled: list[tuple[Mask, FloatArray, FloatArray]] = []

    def at(self, moving: Mask, fed_by: IntArray, tied: Mask) -> FloatArray:
        """Bytes per second of every flow.

        Args:
            moving: Which flows have something to move.
            fed_by: For each flow the node it may not outrun.
            tied: For which flows this counts.
        """
        flows = self._flows
        rates = self._fill(0, moving, flows.limits)
        rows = np.flatnonzero(tied)
        if not len(rows):
            return rates
        num_nodes = max(int(flows.nodes.max(initial=0)), int(fed_by[rows].max(initial=0))) + 1
        caps = flows.limits.copy()
        for number in range(1, 4):
            before = caps[rows]
            while True:  # A slow relay slows those behind it, one hop a round.
                held = np.minimum(rates, caps)
                fed = np.bincount(flows.nodes, weights=held, minlength=num_nodes)[fed_by[rows]]
                too_fast = held[rows] > fed * (1 + _SLACK)
                if not too_fast.any():
                    break
                caps[rows[too_fast]] = fed[too_fast]
            if np.array_equal(before, caps[rows]):
                break
            rates = self._fill(number, moving, caps)
        return np.minimum(rates, caps)

    def _fill(self, number: int, moving: Mask, caps: FloatArray) -> FloatArray:
        """The rates below these caps, from those that were last worked out under this number."""
        if number == len(self._filled):
            rates = _fill(self._flows, moving, caps, self._num_ports)
            self._filled.append((moving, caps.copy(), rates))
            return rates
        moving_before, caps_before, rates = self._filled[number]
        differs = (moving != moving_before) | (moving & (caps != caps_before))
        if differs.any():
            concerned = np.zeros(self._num_ports, dtype=bool)
            concerned[self._groups[differs]] = True
            again = concerned[self._groups]
            fresh = _fill(self._flows, moving & again, caps, self._num_ports)
            rates = np.where(again, fresh, rates)
        self._filled[number] = moving, caps.copy(), rates
        return rates


def _connected(flows: Flows, num_ports: int) -> IntArray:
    """For each flow a number that is the same for all that have ports in common, one by one."""
    labels = np.arange(num_ports)
    ports = np.where(flows.weights > 0, flows.ports, flows.ports[0])
    while True:
        least = labels[ports].min(axis=0)
        found = labels.copy()
        np.minimum.at(found, ports.ravel(), np.tile(least, len(ports)))
        found = found[found]
        if np.array_equal(found, labels):
            return labels[ports[0]]
        labels = found


def _fill(flows: Flows, moving: Mask, caps: FloatArray, num_ports: int) -> FloatArray:
    """Raise all rates together; a flow stops at its cap or when a port of its is full.

    Works on shares, a flow's rate over its speed. In every round those flows stop that are held
    back by nothing but their cap, or by a port that is the tightest of all its flows: such ports
    are settled side by side, so the rounds are as many as ports wait for one another, not as many
    as there are ports.
    """
    shares = np.zeros(len(moving))
    rows = np.flatnonzero(moving)
    ports, weights = flows.ports[:, rows], flows.weights[:, rows]
    if ports.size < num_ports:
        used, ports = np.unique(ports, return_inverse=True)
        ports, num_ports = ports.reshape(weights.shape), len(used)
    limit = caps[rows] / flows.speeds[rows]
    room = np.ones(num_ports)
    while len(rows):
        flat, flat_weights = ports.ravel(), weights.ravel()
        crowd = np.bincount(flat, weights=flat_weights, minlength=num_ports)
        with np.errstate(divide="ignore", invalid="ignore"):
            level = np.where(crowd > 0, np.maximum(room, 0.0) / crowd, np.inf)
        levels = level[ports]
        reach = np.minimum(levels.min(axis=0), limit)
        is_looser = (levels > reach * (1 + _SLACK) + 1e-15) & (weights > 0)
        unsettled = np.bincount(flat, weights=is_looser.ravel(), minlength=num_ports) > 0
        holds = ~unsettled[ports] & (weights > 0)
        stops = holds.any(axis=0) | (limit <= reach)
        if not stops.any():  # Nothing but rounding keeps them apart.
            stops = reach <= reach.min() * (1 + 1e-6)
        shares[rows[stops]] = reach[stops]
        used = weights[:, stops] * reach[stops]
        room -= np.bincount(ports[:, stops].ravel(), weights=used.ravel(), minlength=num_ports)
        going = ~stops
        rows, ports, weights = rows[going], ports[:, going], weights[:, going]
        limit = limit[going]
    return shares * flows.speeds


class Fluid:
    """Flows on their way.

    Args:
        flows: The flows.
        begins: When those that need nobody to be fed begin; the others follow when they can.
        chunk_bytes: What a relay has before it passes on.
        num_ports: How many ports there are.

    Attributes:
        flows: All flows so far.
        now: The time.
        done: Bytes that each flow has moved.
        begins: When each began, infinity if it did not.
        ends: When each had everything or was lost, infinity if neither.
        lost: Flows that a death ended.
        busy: How long each port was busy.
        num_events: Steps so far.
    """

    def __init__(
        self, flows: Flows, begins: FloatArray, chunk_bytes: float, num_ports: int
    ) -> None:
        count = len(flows.nodes)
        self.flows = flows
        self.now = 0.0
        self.done = np.zeros(count)
        self.begins = np.where(flows.upstream == NO_NODE, begins, np.inf)
        self.ends = np.full(count, np.inf)
        self.lost = np.zeros(count, dtype=bool)
        self.busy = np.zeros(num_ports)
        self.num_events = 0
        self._chunk_bytes = chunk_bytes
        self._names, dense = np.unique(flows.nodes, return_inverse=True)
        self._dense = dense.ravel()
        self._wanted = np.bincount(self._dense, weights=flows.sizes, minlength=len(self._names))
        self._compact()

    def unfinished(self) -> Mask:
        """Flows that go on."""
        return ~self.lost & (self.flows.sizes - self.done > _HALF)

    def lose(self, rows: Mask) -> None:
        """End some flows here and now."""
        self.lost |= rows
        self.ends[rows] = self.now
        self._compact()

    def add(self, flows: Flows, begins: FloatArray) -> None:
        """Add flows into nodes that there are already."""
        self.flows = self.flows.joined(flows)
        self._dense = np.concatenate([self._dense, self._numbers(flows.nodes)])
        self.done = np.concatenate([self.done, np.zeros(len(begins))])
        self.begins = np.concatenate([self.begins, begins])
        self.ends = np.concatenate([self.ends, np.full(len(begins), np.inf)])
        self.lost = np.concatenate([self.lost, np.zeros(len(begins), dtype=bool)])
        self._compact()

    def _numbers(self, nodes: IntArray) -> IntArray:
        """Nodes as positions; one past the last for those that nobody feeds."""
        count = len(self._names)
        at = np.minimum(np.searchsorted(self._names, nodes), count - 1)
        return np.where(self._names[at] == nodes, at, count) if count else np.zeros_like(nodes)

    def _compact(self) -> None:
        """Look at nothing but the flows that go on."""
        rows = self._rows = np.flatnonzero(self.unfinished())
        live = self.flows.take(rows)
        above = self._numbers(live.upstream)
        above[live.upstream == NO_NODE] = len(self._names)
        self._fed = np.append(
            np.bincount(self._dense, weights=self.done, minlength=len(self._names)), np.inf
        )
        wanted = np.append(self._wanted, 0.0)
        self._live = Flows(
            self._dense[rows], above, *(getattr(live, item.name) for item in fields(live)[2:])
        )
        self._rates = FairRates(self._live)
        self._behind = above < len(self._names)
        self._enough = wanted[above] - _HALF
        mine = self._wanted[self._dense[rows]]
        with np.errstate(divide="ignore"):
            self._scale = np.where(self._behind, mine / np.maximum(wanted[above], 1.0), 1.0)
        self._chunk = np.minimum(self._chunk_bytes, live.sizes)

    def until(self, end_s: float, watch: Watch = unwatched) -> bool:
        """Let time pass, at most until then; returns whether anything is left to happen."""
        while self.now < end_s:
            if not self.num_events % _TOLD_EVERY:
                total = max(float(self.flows.sizes.sum()), 1.0)
                watch("simulating", float(self.done.sum()) / total)
            if not self._step(end_s):
                return False
            self.num_events += 1
        return True

    def _step(self, end_s: float) -> bool:
        """Move to the next event; returns whether there is one."""
        live, rows, now = self._live, self._rows, self.now
        done, begins = self.done[rows], self.begins[rows]
        left = live.sizes - done
        is_open = left > _HALF
        fed = self._fed[live.upstream]
        have = fed * self._scale
        is_whole = fed >= self._enough
        # A relay that has its first chunk can be asked for it.
        waits = is_open & np.isinf(begins)
        ready = waits & (is_whole | (have >= self._chunk * (1 - _SLACK)))
        begins[ready] = now + live.latencies[ready]
        self.begins[rows] = begins
        moving = is_open & (begins <= now * (1 + _SLACK))
        with np.errstate(invalid="ignore"):
            ahead = have - self._chunk - done
        tied = moving & ~is_whole & (ahead <= self._chunk * 1e-6)
        rates = self._rates.at(moving, live.upstream, tied)
        inflow = np.bincount(live.nodes, weights=rates, minlength=len(self._fed))
        gain = inflow[live.upstream] * self._scale
        with np.errstate(divide="ignore", invalid="ignore"):
            finish = np.where(moving & (rates > 0), left / rates, np.inf)
            start = np.where(waits & ~ready & (gain > 0), (self._chunk - have) / gain, np.inf)
            closing = moving & ~is_whole & ~tied & (rates > gain)
            catch_up = np.where(closing, ahead / (rates - gain), np.inf)
        begin = np.where(is_open & ~moving, begins - now, np.inf)
        times = np.minimum(np.minimum(finish, start), np.minimum(catch_up, begin))
        wait = float(times.min(initial=np.inf))
        if wait == np.inf and end_s == np.inf:
            return False
        self._pass(min(max(wait, 0.0), end_s - now), rates, left)
        return True

    def _pass(self, seconds: float, rates: FloatArray, left: FloatArray) -> None:
        live, rows = self._live, self._rows
        step = rates * seconds
        # What would be done within this share of the time so far is done now: one event, not many.
        soon = (rates > 0) & (left - step <= rates * (self.now + seconds) * _MERGED + _HALF)
        step[soon] = left[soon]
        self.done[rows] += step
        self._fed += np.bincount(live.nodes, weights=step, minlength=len(self._fed))
        self.now += seconds
        self.ends[rows[soon]] = self.now
        shares = (live.weights * (rates / live.speeds * seconds)).ravel()
        self.busy += np.bincount(live.ports.ravel(), weights=shares, minlength=len(self.busy))
        if np.count_nonzero(left - step > _HALF) < _COMPACT * len(rows):
            self._compact()
