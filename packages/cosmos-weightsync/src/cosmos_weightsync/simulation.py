"""How long a plan takes, by simulating it event by event: thousands of ranks, deaths included.

Events are: a flow has something to move, a flow has caught up with the relay it takes from, a flow
is done, a rank dies. Between two events all rates are constant, so a transfer of terabytes takes as
many steps as it has such events. What is not modelled: congestion inside the network, and the time
the processors take.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cosmos_weightsync.errors import TopologyError, UncoveredRegionError
from cosmos_weightsync.flows import NO_NODE, FloatArray, Flows, fair_rates, flows_of, relayed_routes
from cosmos_weightsync.plans import TransferPlan
from cosmos_weightsync.replanning import replan_without

__all__ = ["Failure", "Simulation", "Span", "simulate"]

_SLACK = 1e-9
_MERGED = 5e-4
_GIB = 1 << 30


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """A rank that dies.

    Attributes:
        holder: Which: a sender rank, or ``num_senders + r`` for receiver rank r.
        at_s: When.
    """

    holder: int
    at_s: float


@dataclass(frozen=True, slots=True)
class Span:
    """One flow in time: what ``receiver`` took from ``source``, until done or until a death."""

    source: int
    receiver: int
    start_s: float
    end_s: float
    num_bytes: float


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class Simulation:
    """What happened.

    Attributes:
        finish_s: For each receiver rank when it had everything; infinity if it never had, 0 if it
            wanted nothing.
        dead: Holders that died.
        busy: The busiest ports, busiest first: name and share of the time until the end.
        spans: Every flow.
        num_events: Steps the simulator took.
    """

    finish_s: FloatArray
    dead: tuple[int, ...]
    busy: tuple[tuple[str, float], ...]
    spans: tuple[Span, ...]
    num_senders: int
    num_events: int

    @property
    def seconds(self) -> float:
        """When the last receiver that lives had everything; infinity if one never had."""
        lives = [s for rank, s in enumerate(self.finish_s) if self.lives(rank)]
        return float(max(lives, default=0.0))

    @property
    def recovered(self) -> bool:
        """Whether every receiver that lives got everything."""
        return self.seconds < float("inf")

    @property
    def end_s(self) -> float:
        """When the last byte moved."""
        ends = [span.end_s for span in self.spans if span.end_s < float("inf")]
        return max(ends, default=0.0)

    def lives(self, rank: int) -> bool:
        """Whether a receiver rank did not die."""
        return self.num_senders + rank not in self.dead

    def sample(self, count: int) -> list[int]:
        """So many receiver ranks, evenly picked, the first and the last among them."""
        last = len(self.finish_s) - 1
        return (
            sorted({round(i * last / max(count - 1, 1)) for i in range(count)}) if last >= 0 else []
        )

    def picture(self, width: int = 72, rows: int = 24) -> str:
        """A timeline as text: a line for each receiver (evenly picked), ``#`` while it takes in.

        A receiver that died shows ``x`` from there on, one that waits shows ``.``.
        """
        total = self.end_s or 1.0
        lines = [f"{'receiver':>9} 0 s{'':{max(width - 14, 1)}}{total:.4g} s"]
        for rank in self.sample(rows):
            mine = [span for span in self.spans if span.receiver == rank]
            cells = ["."] * width
            for span in mine:
                low, high = span.start_s / total * width, min(span.end_s / total, 1) * width
                cells[int(low) : max(int(low) + 1, round(high))] = "#" * (
                    max(int(low) + 1, round(high)) - int(low)
                )
            end = self.finish_s[rank]
            text = "x" if not self.lives(rank) else ("never" if end == np.inf else f"{end:.4g} s")
            lines.append(f"{rank:>9} {''.join(cells[:width])} {text}")
        return "\n".join(lines)


def simulate(
    plan: TransferPlan,
    *,
    failures: Sequence[Failure] = (),
    detect_s: float = 1.0,
) -> Simulation:
    """Run a plan over its topology.

    Args:
        plan: What to move, as `plan_transfer` made it with a topology.
        failures: Who dies when.
        detect_s: How long after a death the others go on without the dead, by the rules of
            `replan_without`.

    Raises:
        TopologyError: somebody who is not in the plan dies.
    """
    for failure in failures:
        if not 0 <= failure.holder < plan.num_holders:
            raise TopologyError(f"no holder {failure.holder}: the plan has {plan.num_holders}")
    run = _Run(plan, detect_s)
    for failure in sorted(failures, key=lambda item: item.at_s):
        run.until(failure.at_s)
        run.kill(failure.holder)
    run.until(float("inf"))
    return run.result()


class _Run:
    """The state between two events."""

    def __init__(self, plan: TransferPlan, detect_s: float) -> None:
        self._plan = plan
        self._detect_s = detect_s
        self._now = 0.0
        self._dead: list[int] = []
        self._num_events = 0
        streams = plan.streams()
        self._relayed = relayed_routes(streams, plan.num_senders)
        flows = flows_of(streams, plan.topology, self._relayed)
        self._flows = flows
        self._num_nodes = int(flows.nodes.max(initial=-1)) + 1
        self._wanted = np.bincount(flows.nodes, weights=flows.sizes, minlength=self._num_nodes + 1)
        self._done = np.zeros(len(flows.nodes))
        self._lost = np.zeros(len(flows.nodes), dtype=bool)
        self._ends = np.full(len(flows.nodes), np.inf)
        self._begins = np.where(flows.upstream == NO_NODE, self._first_byte(flows), np.inf)
        self._busy = np.zeros(len(flows.port_names))

    def _first_byte(self, flows: Flows) -> FloatArray:
        """When a flow from a sender begins: its memory is registered, the request has arrived."""
        wanted = np.bincount(flows.receivers, weights=flows.sizes)
        registered = wanted * self._plan.topology.links.registration_s_per_gib / _GIB
        return flows.latencies + registered[flows.receivers] if len(flows.nodes) else np.zeros(0)

    def until(self, end_s: float) -> None:
        """Let time pass, at most until then."""
        while self._now < end_s and self._step(end_s):
            self._num_events += 1

    def _step(self, end_s: float) -> bool:
        """Move to the next event; returns whether there is one."""
        flows, now = self._flows, self._now
        left = flows.sizes - self._done
        fed = np.bincount(flows.nodes, weights=self._done, minlength=self._num_nodes + 1)
        behind = flows.upstream != NO_NODE
        have = np.where(behind, fed[flows.upstream], np.inf)
        is_whole = ~behind | (have >= self._wanted[flows.upstream] - 0.5)
        open_flows = ~self._lost & (left > 0.5)
        # A relay that has its first chunk can be asked for it.
        chunk = np.minimum(self._plan.topology.chunk_bytes, flows.sizes)
        ready = open_flows & np.isinf(self._begins) & (is_whole | (have >= chunk * (1 - _SLACK)))
        self._begins[ready] = now + flows.latencies[ready]
        moving = open_flows & (self._begins <= now * (1 + _SLACK))
        ahead = have - chunk - self._done
        tied = moving & ~is_whole & (ahead <= chunk * 1e-6)
        rates = fair_rates(flows, moving, tied, self._num_nodes)
        inflow = np.bincount(flows.nodes, weights=rates, minlength=self._num_nodes + 1)
        gain = np.where(behind, inflow[flows.upstream], 0.0)
        with np.errstate(divide="ignore", invalid="ignore"):
            finish = np.where(moving & (rates > 0), left / rates, np.inf)
            start = np.where(
                open_flows & np.isinf(self._begins) & (gain > 0), (chunk - have) / gain, np.inf
            )
            closing = moving & ~is_whole & ~tied & (rates > gain)
            catch_up = np.where(closing, ahead / (rates - gain), np.inf)
        begin = np.where(open_flows & ~moving, self._begins - now, np.inf)
        times = np.minimum(np.minimum(finish, start), np.minimum(catch_up, begin))
        wait = float(times.min(initial=np.inf))
        if wait == np.inf and end_s == np.inf:
            return False
        self._pass(min(max(wait, 0.0), end_s - now), rates, left)
        return True

    def _pass(self, seconds: float, rates: FloatArray, left: FloatArray) -> None:
        flows = self._flows
        step = rates * seconds
        # What would be done within this share of the time so far is done now: one event, not many.
        soon = (rates > 0) & (left - step <= rates * (self._now + seconds) * _MERGED + 0.5)
        step[soon] = left[soon]
        self._done += step
        self._now += seconds
        self._ends[soon] = self._now
        share = rates / flows.speeds * seconds
        single = flows.out != flows.into
        count = len(self._busy)
        self._busy += np.bincount(flows.out, weights=share, minlength=count)
        self._busy += np.bincount(flows.into[single], weights=share[single], minlength=count)

    def kill(self, holder: int) -> None:
        """A rank dies; others notice later, and take what it owed them from somebody else."""
        if holder in self._dead:
            return
        self._dead.append(holder)
        flows, num_senders = self._flows, self._plan.num_senders
        is_open = ~self._lost & (flows.sizes - self._done > 0.5)
        hurt = is_open & ((flows.sources == holder) | (flows.receivers + num_senders == holder))
        self._lost |= hurt
        self._ends[hurt] = self._now
        unfinished = set(flows.receivers[is_open].tolist())
        finished = set(flows.receivers.tolist()) - unfinished
        committed = {rank for rank in finished if rank + num_senders not in self._dead}
        try:
            after = replan_without(self._plan, self._dead, committed=committed)
        except UncoveredRegionError:
            return  # Whoever waits for the dead waits for ever.
        self._add(flows_of(after.streams(), self._plan.topology, self._relayed), hurt)

    def _add(self, after: Flows, hurt: np.ndarray) -> None:
        """Add flows for what is missing because of the dead, in the new plan's proportions."""
        flows = self._flows
        lost = np.bincount(flows.nodes[hurt], weights=flows.sizes[hurt], minlength=self._num_nodes)
        left = np.bincount(
            flows.nodes[hurt], weights=(flows.sizes - self._done)[hurt], minlength=self._num_nodes
        )
        before = {
            key: size
            for key, size, gone in zip(
                flows.keys(), flows.sizes.tolist(), self._lost.tolist(), strict=True
            )
            if not gone
        }
        more = after.sizes - np.array([before.get(key, 0.0) for key in after.keys()])  # noqa: SIM118
        known = after.nodes < self._num_nodes
        share = np.zeros(len(more))
        nodes = after.nodes[known]
        with np.errstate(divide="ignore", invalid="ignore"):
            share[known] = np.where(lost[nodes] > 0, left[nodes] / lost[nodes], 0.0)
        rows = np.flatnonzero((more > 0.5) & (share > 0))
        if not len(rows):
            return
        self._flows = _joined(flows, after, rows, more[rows] * share[rows])
        noticed = self._now + self._detect_s + after.latencies[rows]
        self._begins = np.concatenate([self._begins, noticed])
        self._done = np.concatenate([self._done, np.zeros(len(rows))])
        self._ends = np.concatenate([self._ends, np.full(len(rows), np.inf)])
        self._lost = np.concatenate([self._lost, np.zeros(len(rows), dtype=bool)])

    def result(self) -> Simulation:
        """What happened until now."""
        flows, num_receivers = self._flows, self._plan.num_receivers
        finish = np.zeros(num_receivers)
        np.maximum.at(finish, flows.receivers, np.where(self._lost, 0.0, self._ends))
        missing = np.bincount(flows.receivers, weights=flows.sizes - self._done, minlength=1)
        got = np.bincount(flows.receivers, weights=self._done, minlength=num_receivers)
        wanted = np.asarray(self._plan.edge_bytes().sum(axis=0), dtype=np.float64)
        finish[(got < wanted - 1 - 1e-6 * wanted) & (missing[:num_receivers] > 0.5)] = np.inf
        total = max(self._now, 1e-30)
        order = np.argsort(-self._busy, kind="stable")[:10].tolist()
        names = flows.port_names
        columns = (flows.sources, flows.receivers, self._begins, self._ends, self._done)
        rows = zip(*(column.tolist() for column in columns), strict=True)
        return Simulation(
            finish_s=finish,
            dead=tuple(self._dead),
            busy=tuple((names[port], float(self._busy[port] / total)) for port in order),
            spans=tuple(Span(*row) for row in rows if row[4] > 0),
            num_senders=self._plan.num_senders,
            num_events=self._num_events,
        )


def _joined(flows: Flows, after: Flows, rows: np.ndarray, sizes: FloatArray) -> Flows:
    """The flows, and some of another plan's with other sizes."""

    def both(name: str) -> np.ndarray:
        return np.concatenate([getattr(flows, name), getattr(after, name)[rows]])

    return Flows(
        nodes=both("nodes"),
        upstream=both("upstream"),
        sources=both("sources"),
        receivers=both("receivers"),
        sizes=np.concatenate([flows.sizes, sizes]),
        depths=both("depths"),
        out=both("out"),
        into=both("into"),
        speeds=both("speeds"),
        latencies=both("latencies"),
        port_names=flows.port_names,
    )
