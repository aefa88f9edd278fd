"""Chain, tree or direct, and in chunks of what size: candidates are simulated, the first one wins.

A closed form makes the guesses, since there are hundreds of forests. Of every kind of forest the
best few are then simulated on a model of the transfer: one flow for each host, through one port for
all senders. A forest is symmetric, so this is what the flows of the whole plan would show, but for
what sets of receivers of different kinds take from one another.

Only multiplications, divisions, comparisons and sums in a fixed order are used: every machine
chooses alike.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from cosmos_weightsync.fluid import NO_NODE, Flows, Fluid
from cosmos_weightsync.links import Link
from cosmos_weightsync.routing import Shape, tree_depth

__all__ = ["CHUNK_BYTES", "Candidate", "Demand", "choose_shapes", "fastest", "simulated_s"]

CHUNK_BYTES = (16 << 20, 4 << 20, 1 << 20)
"""What is tried where the topology does not say."""

_MAX_ARITY = 4
_MAX_SIMULATED_HOSTS = 1024
_MAX_COUNTS = 4
_PER_KIND = 2
_WORTH = 0.999
_HOPELESS = 1.5


@dataclass(frozen=True, kw_only=True, slots=True)
class Demand:
    """What a whole transfer asks of the network.

    Attributes:
        send_bytes: Over the busiest card of the senders if every byte leaves once.
        receive_bytes: Over each card of the busiest host if everything it wants enters once.
        link: What a card can do.
    """

    send_bytes: int
    receive_bytes: int
    link: Link

    def with_pieces(self, num_bytes: int, chunk_bytes: int) -> float:
        """Bytes, and what their chunks cost in bytes that could have moved meanwhile."""
        num_chunks = -(-num_bytes // chunk_bytes)
        return num_bytes + num_chunks * self.link.piece_s * self.link.bytes_per_s


@dataclass(frozen=True, slots=True)
class Candidate:
    """A forest over hosts, and the chunks that flow through it."""

    shape: Shape
    chunk_bytes: int

    def estimate(self, num_hosts: int, demand: Demand) -> float:
        """Seconds until the last host has everything.

        For a chain this is (K + D - 1) / K of the single transfer, with K chunks and D hosts.
        """
        depth, shape = tree_depth(num_hosts, self.shape), self.shape
        receive = demand.with_pieces(demand.receive_bytes, self.chunk_bytes)
        send = demand.with_pieces(demand.send_bytes, self.chunk_bytes)
        relay = shape.arity * receive if depth > 1 else 0.0
        chunk = min(self.chunk_bytes, demand.receive_bytes)
        hop = demand.with_pieces(chunk, self.chunk_bytes) * (shape.arity if depth > 1 else 1)
        busiest = max(shape.feeds * send, relay, receive)
        return (busiest + (depth - 1) * hop) / demand.link.bytes_per_s + (
            depth * demand.link.latency_s
        )


def choose_shapes(
    counts: Iterable[int], demand: Demand, chunk_bytes: int | None
) -> tuple[dict[int, Shape], int]:
    """The forest for each number of hosts, and the size of chunks for all of them.

    Args:
        counts: Numbers of hosts without a holder that some payload goes to.
        demand: Of the whole transfer.
        chunk_bytes: The size of chunks if it is given.

    Returns:
        Forests by number of hosts. The chunks are those best for the largest number; the forests of
        all but the largest few numbers are guessed only.
    """
    ordered = sorted(set(counts), reverse=True)
    sizes = CHUNK_BYTES if chunk_bytes is None else (chunk_bytes,)
    found: dict[int, Shape] = {}
    for position, count in enumerate(ordered):
        if count <= 1 or not demand.receive_bytes:
            found[count] = Shape(max(count, 1), 1)
            continue
        candidates = guesses(count, demand, sizes)
        if position < _MAX_COUNTS and count <= _MAX_SIMULATED_HOSTS:
            best = fastest(count, demand, candidates)
        else:
            best = candidates[0]
        found[count] = best.shape
        sizes = (best.chunk_bytes,)
    return found, sizes[0]


def guesses(num_hosts: int, demand: Demand, chunk_sizes: Sequence[int]) -> list[Candidate]:
    """The few candidates of each kind that the closed form thinks best, the best of all first."""
    kinds: dict[tuple[int, int, int], list[tuple[float, int, Candidate]]] = {}
    for number, candidate in enumerate(_candidates(num_hosts, chunk_sizes)):
        shape = candidate.shape
        kind = (shape.arity, candidate.chunk_bytes, int(shape.feeds == num_hosts))
        rating = (candidate.estimate(num_hosts, demand), number, candidate)
        kinds.setdefault(kind, []).append(rating)
    rated = [item for ratings in kinds.values() for item in sorted(ratings)[:_PER_KIND]]
    rated.sort(key=lambda item: item[:2])
    limit = rated[0][0] * _HOPELESS
    return [candidate for estimate, _, candidate in rated if estimate <= limit]


def _candidates(num_hosts: int, chunk_sizes: Sequence[int]) -> Iterator[Candidate]:
    """Forests with ever fewer relays fed by holders, direct first."""
    for chunk_bytes in chunk_sizes:
        yield Candidate(Shape(num_hosts, 1), chunk_bytes)
        feeds = num_hosts
        while feeds > 1:
            feeds = min(feeds - 1, feeds * 15 // 16)
            for arity in range(1, _MAX_ARITY + 1):
                yield Candidate(Shape(feeds, arity), chunk_bytes)


def fastest(num_hosts: int, demand: Demand, candidates: Sequence[Candidate]) -> Candidate:
    """The candidate that finishes first when simulated; of nearly equal ones, the first given."""
    best, best_s = candidates[0], float("inf")
    for candidate in candidates:
        seconds = simulated_s(num_hosts, demand, candidate, give_up_s=best_s)
        if seconds < best_s * _WORTH:
            best, best_s = candidate, seconds
    return best


def simulated_s(
    num_hosts: int, demand: Demand, candidate: Candidate, *, give_up_s: float = float("inf")
) -> float:
    """Seconds until the last host has everything; infinity if that is later than ``give_up_s``."""
    flows, num_ports = _forest(num_hosts, demand, candidate)
    fluid = Fluid(flows, flows.latencies, candidate.chunk_bytes, num_ports)
    fluid.until(give_up_s)
    return float("inf") if bool(fluid.unfinished().any()) else float(fluid.ends.max(initial=0.0))


def _forest(num_hosts: int, demand: Demand, candidate: Candidate) -> tuple[Flows, int]:
    """One flow into each host; port 0 is that of the senders, the last one is none."""
    shape, hosts = candidate.shape, np.arange(num_hosts)
    is_fed = hosts < shape.feeds
    upstream = np.where(is_fed, NO_NODE, (hosts - shape.feeds) // shape.arity)
    none = 2 * num_hosts + 1
    size = demand.with_pieces(demand.receive_bytes, candidate.chunk_bytes)
    ones, zeros = np.ones(num_hosts), np.zeros(num_hosts)
    sender = demand.send_bytes / demand.receive_bytes
    flows = Flows(
        nodes=hosts,
        upstream=upstream,
        sources=upstream,
        receivers=hosts,
        sizes=ones * size,
        overheads=zeros,
        ports=np.stack(
            [np.where(is_fed, 0, 1 + upstream), 1 + num_hosts + hosts, np.full(num_hosts, none)]
        ),
        weights=np.stack([np.where(is_fed, sender, 1.0), ones, zeros]),
        speeds=ones * demand.link.bytes_per_s,
        limits=ones * (demand.link.stream_bytes_per_s or np.inf),
        latencies=ones * demand.link.latency_s,
    )
    return flows, none + 1
