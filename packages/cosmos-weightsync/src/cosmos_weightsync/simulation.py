"""How long a plan takes, by simulating it event by event: thousands of ranks, deaths included.

Events are: a flow has something to move, a flow has caught up with the relay it takes from, a flow
is done, a rank dies. Between two events all rates are constant, so a transfer of terabytes takes as
many steps as it has such events. What is not modelled: congestion inside the network, and the time
the processors take.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from cosmos_weightsync.errors import TopologyError
from cosmos_weightsync.flows import flows_of, relayed_routes
from cosmos_weightsync.fluid import FloatArray, Flows, Fluid, Mask
from cosmos_weightsync.plans import TransferPlan
from cosmos_weightsync.replanning import replan_living
from cosmos_weightsync.streams import ports
from cosmos_weightsync.watching import Watch, unwatched

__all__ = ["Failure", "Simulation", "Span", "simulate"]

_GIB = 1 << 30
_HALF = 0.5  # Of a byte.


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
        return _last_end(self.spans)

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
    watch: Watch = unwatched,
) -> Simulation:
    """Run a plan over its topology.

    Args:
        plan: What to move, as `plan_transfer` made it with a topology.
        failures: Who dies when.
        detect_s: How long after a death the others go on without the dead, by the rules of
            `replan_without`.
        watch: Called now and then with what is being done and which share of it is done, 0 to 1.

    Raises:
        TopologyError: somebody who is not in the plan dies, or a time is none.
    """
    if not all(0 <= time < math.inf for time in (detect_s, *(item.at_s for item in failures))):
        raise TopologyError("deaths and their detection need a time, finite and not negative")
    for failure in failures:
        if not 0 <= failure.holder < plan.num_holders:
            raise TopologyError(f"no holder {failure.holder}: the plan has {plan.num_holders}")
    run = _Run(plan, detect_s, watch)
    for failure in sorted(failures, key=lambda item: item.at_s):
        run.until(failure.at_s)
        run.kill(failure.holder)
    run.until(float("inf"))
    return run.result()


def _last_end(spans: Sequence[Span]) -> float:
    return max((span.end_s for span in spans if span.end_s < float("inf")), default=0.0)


class _Run:
    """A plan under way."""

    def __init__(self, plan: TransferPlan, detect_s: float, watch: Watch) -> None:
        self._watch = watch
        self._plan = plan
        self._detect_s = detect_s
        self._dead: list[int] = []
        streams = plan.streams()
        self._relayed = relayed_routes(streams, plan.num_senders)
        flows = flows_of(plan, streams, self._relayed)
        wanted = flows.sizes * (1.0 - flows.overheads)
        self._planned = wanted  # Bytes of a plan that each flow stands for, or for what is left of.
        self._wanted = np.bincount(flows.receivers, weights=wanted, minlength=plan.num_receivers)
        none = np.zeros(0, dtype=np.int64)
        self._names = ports(none, none, plan.topology).names
        self._fluid = Fluid(flows, self._first_byte(flows), plan.chunk_bytes, len(self._names) + 1)

    def _first_byte(self, flows: Flows) -> FloatArray:
        """When a flow from a sender begins: its memory is registered, the request has arrived."""
        wanted = np.bincount(flows.receivers, weights=flows.sizes)
        registered = wanted * self._plan.topology.links.registration_s_per_gib / _GIB
        return flows.latencies + registered[flows.receivers] if len(flows.nodes) else np.zeros(0)

    def until(self, end_s: float) -> None:
        """Let time pass, at most until then."""
        self._fluid.until(end_s, self._watch)

    def kill(self, holder: int) -> None:
        """A rank dies; others notice later, and take what it owed them from somebody else."""
        if holder in self._dead:
            return
        self._dead.append(holder)
        flows, num_senders = self._fluid.flows, self._plan.num_senders
        is_open = self._fluid.unfinished()
        hurt = is_open & ((flows.sources == holder) | (flows.receivers + num_senders == holder))
        self._fluid.lose(hurt)
        unfinished = {*flows.receivers[is_open].tolist(), *np.flatnonzero(self._lack()).tolist()}
        finished = set(flows.receivers.tolist()) - unfinished
        committed = {rank for rank in finished if rank + num_senders not in self._dead}
        after, _ = replan_living(self._plan, self._dead, committed)
        again = flows_of(after, after.streams(), self._relayed)
        lives = ~np.isin(again.sources, self._dead)  # Whoever waits for the dead waits for ever.
        self._add(again.take(np.flatnonzero(lives)), hurt)

    def _add(self, after: Flows, hurt: Mask) -> None:
        """Add flows for what is missing because of the dead, in the new plan's proportions.

        Counted in bytes of weights: what pieces cost beside these differs from plan to plan.
        """
        fluid, flows = self._fluid, self._fluid.flows
        num_nodes = int(max(flows.nodes.max(initial=-1), after.nodes.max(initial=-1))) + 1
        useful, wanted = 1.0 - flows.overheads, after.sizes * (1.0 - after.overheads)
        unmoved = ((flows.sizes - fluid.done) * useful)[hurt]
        lost = np.bincount(flows.nodes[hurt], weights=self._planned[hurt], minlength=num_nodes)
        left = np.bincount(flows.nodes[hurt], weights=unmoved, minlength=num_nodes)
        before: dict[tuple[int, int], float] = {}
        for key, size, gone in zip(
            flows.keys(), self._planned.tolist(), fluid.lost.tolist(), strict=True
        ):
            before[key] = before.get(key, 0.0) + (0.0 if gone else size)
        more = wanted - np.array([before.get(key, 0.0) for key in after.keys()])  # noqa: SIM118
        rows = np.flatnonzero((more > _HALF) & (left[after.nodes] > 0))
        if len(rows):
            nodes = after.nodes[rows]
            # What the dead had sent before is in the new plan too, and is not sent again.
            told = np.maximum(np.bincount(nodes, weights=more[rows], minlength=num_nodes), lost)
            again = more[rows] * (left[nodes] / told[nodes])
            added = replace(after.take(rows), sizes=again / (1.0 - after.overheads[rows]))
            self._planned = np.concatenate([self._planned, more[rows]])
            fluid.add(added, fluid.now + self._detect_s + added.latencies)

    def _lack(self) -> Mask:
        """``[receivers]``: who has not got everything, be it under way or lost."""
        flows, done = self._fluid.flows, self._fluid.done
        size = self._plan.num_receivers
        missing = np.bincount(flows.receivers, weights=flows.sizes - done, minlength=size)
        moved = done * (1.0 - flows.overheads)
        got = np.bincount(flows.receivers, weights=moved, minlength=size)
        return (got < self._wanted - 1 - 1e-6 * self._wanted) & (missing > _HALF)

    def result(self) -> Simulation:
        """What happened until now."""
        fluid, num_receivers = self._fluid, self._plan.num_receivers
        flows, ends = fluid.flows, np.where(fluid.lost, 0.0, fluid.ends)
        finish = np.zeros(num_receivers)
        np.maximum.at(finish, flows.receivers, ends)
        moved = fluid.done * (1.0 - flows.overheads)
        finish[self._lack()] = np.inf
        columns = (flows.sources, flows.receivers, fluid.begins, fluid.ends, moved)
        rows = zip(*(column.tolist() for column in columns), strict=True)
        spans = tuple(Span(*row) for row in rows if row[4] > 0)
        total = max(_last_end(spans), 1e-30)  # Somebody may have died long after it.
        busy = fluid.busy[:-1]
        order = np.argsort(-busy, kind="stable")[:10].tolist()
        return Simulation(
            finish_s=finish,
            dead=tuple(self._dead),
            busy=tuple((self._names[port], float(busy[port] / total)) for port in order),
            spans=spans,
            num_senders=self._plan.num_senders,
            num_events=fluid.num_events,
        )
