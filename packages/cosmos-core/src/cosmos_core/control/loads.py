"""Who is to load which weights: replicas that are behind, the newest, from who serves it.

```
          machine A        machine B             machine C
policy ─┬─► rollouts
        └────────────────► first rollout ──────► first rollout ──► …
                             ├─► second            ├─► second
                             └─► third             └─► third
```
A version enters each machine once and is passed on inside. From machine to machine it goes along as
many chains as the policy can feed at full speed: one for as many of its ranks as a rollout has.
Whoever is in a chain passes on what has come while the rest comes, so that the last has the version
little later than the first (decision 0376). So it is with the first version of rollouts that start
together. One that joins later is sent to its own machine, if somebody there has the version or will
have it; else to one that has it and sends nothing, if there is one.
"""

import itertools
from collections.abc import Callable, Iterable, Sequence

from cosmos_core.control.state import UNKNOWN_VERSION, ControllerState, ReplicaState
from cosmos_core.messages import LoadVersion

_LIVELY_S = 5.0
"""A rollout replica silent for longer may hang: others would wait for it for a minute."""
_TRIES = 4
"""So many replicas of a machine, and machines before it, are looked at for one that passes on."""


class _Holders:
    """Who has a version whole and serves it, on each machine.

    Attributes:
        everywhere: All of them.
    """

    def __init__(self, state: ControllerState, version: int, now: float) -> None:
        rollouts = state.rollouts()
        self.everywhere = [r for r in rollouts if _has(r, version) and _can_serve(r, now)]
        self._here: dict[str, list[ReplicaState]] = {}
        for holder in self.everywhere:
            self._here.setdefault(holder.host, []).append(holder)
        self._idle: list[ReplicaState] = []
        if self.everywhere:
            busy = {r.loading_from for r in rollouts if r.loading != UNKNOWN_VERSION}
            self._idle = [holder for holder in self.everywhere if holder.name not in busy]

    def of(self, machine: str) -> list[ReplicaState]:
        """Those of a machine, who give a version to others of it without the network."""
        return self._here.get(machine, [])

    def take_idle(self, seat: int) -> ReplicaState | None:
        """Return one that sends nothing yet, each once."""
        return self._idle.pop(seat % len(self._idle)) if self._idle else None


class LoadOrders:
    """Gives the orders; keeps nothing that could not be made anew from the state."""

    def __init__(self, state: ControllerState) -> None:
        """Nothing is looked at yet."""
        self._state = state
        self._made_of = (0, 0)
        self._machines: list[list[str]] = []
        self._numbers: dict[str, int] = {}

    def give(
        self, names: Iterable[str], now: float, is_pinned: Callable[[ReplicaState], bool]
    ) -> list[tuple[str, LoadVersion]]:
        """Return the orders to those of the named rollout replicas that can follow one now.

        One that is loading is asked again when it is done; one that failed, after a pause; one that
        is pinned keeps its version. All are sent to one that has the version or is being sent it,
        as the module says, if there is one; who failed to load, to the policy.
        """
        policies = self._state.policies()
        target = max((policy.published for policy in policies), default=UNKNOWN_VERSION)
        serving = [p for p in policies if p.published == target and p.endpoints]
        if not serving or target == UNKNOWN_VERSION:
            return []
        ready: list[ReplicaState] = []
        for name in names:
            replica = self._state.replicas.get(name)
            if (
                replica is not None
                and replica.role == "rollout"
                and replica.version < target
                and replica.loading == UNKNOWN_VERSION
                and now >= replica.retry_at_s
                and not is_pinned(replica)
            ):
                replica.loading, replica.loading_from = target, ""
                ready.append(replica)
        newcomers = any(not replica.has_loaded for replica in ready)
        holders = _Holders(self._state, target, now) if newcomers else None
        return [(r.name, self._order(r, serving, holders, now)) for r in ready]

    def _order(
        self,
        replica: ReplicaState,
        serving: Sequence[ReplicaState],
        holders: _Holders | None,
        now: float,
    ) -> LoadVersion:
        holder = None
        number = -1
        if replica.failed_loads == 0:
            number = self._number_of(replica.host)
            ranks = len(replica.endpoints)
            step = sum(_feeds(policy, ranks) for policy in serving)
            before = self._before(replica, number, step)
            if holders is None or replica.has_loaded:
                holder = _passing_on(before, replica.loading, now)
            else:
                holder = _for_newcomer(replica, before, holders, now)
        replica.loading_from = holder.name if holder else ""
        described_by: tuple[str, ...] = ()
        if holder and not replica.has_loaded:
            described_by = _policy_for(replica, number, serving).endpoints
        return LoadVersion(
            version=replica.loading,
            endpoints=(holder or _policy_for(replica, number, serving)).endpoints,
            lineage=len(self._state.line),
            holder=replica.loading_from,
            described_by=described_by,
        )

    def _before(self, replica: ReplicaState, number: int, step: int) -> list[list[ReplicaState]]:
        """Return who is before a replica of the machine with this number, place by place.

        On its own machine, and then on those before it in its chain. It has its order already, or
        gets it in the same turn: so nobody waits for somebody that waits for it.
        """
        if number < 0:
            return []
        own = self._machines[number]
        places = [own[: own.index(replica.name)]]
        places += [self._machines[n] for n in range(number - step, -1, -step)[:_TRIES]]
        return [[self._state.replicas[name] for name in place[:_TRIES]] for place in places]

    def _number_of(self, machine: str) -> int:
        """Return a machine's place in the order of who joined first; -1 if it has policies."""
        replicas = self._state.replicas
        joined, there = self._state.counters.replicas_joined, len(replicas)
        num_new = joined - self._made_of[0]
        new = list(itertools.islice(reversed(replicas.values()), num_new))[::-1]
        if there - self._made_of[1] != num_new or any(each.role == "policy" for each in new):
            new = list(replicas.values())  # somebody has gone, or a machine is a policy's now
            self._machines, self._numbers = [], {}
        self._made_of = joined, there
        of_policies = {policy.host for policy in self._state.policies()}
        for each in new:
            if each.role == "rollout" and each.host not in of_policies:
                number = self._numbers.setdefault(each.host, len(self._machines))
                if number == len(self._machines):
                    self._machines.append([])
                self._machines[number].append(each.name)
        return self._numbers.get(machine, -1)


def _for_newcomer(
    newcomer: ReplicaState, before: Sequence[Sequence[ReplicaState]], holders: _Holders, now: float
) -> ReplicaState | None:
    """Return who sends a replica its first version: of its own machine if anybody has it or will.

    Of another, if there is no policy on its own, one that sends nothing yet; then one that is being
    sent it itself.
    """
    version, seat = newcomer.loading, newcomer.seat
    here = _in_turn(holders.of(newcomer.host), seat)
    if here or not before:
        return here
    return (
        _passing_on(before[:1], version, now)
        or holders.take_idle(seat)
        or _passing_on(before[1:], version, now)
        or _in_turn(holders.everywhere, seat)
    )


def _in_turn(replicas: Sequence[ReplicaState], seat: int) -> ReplicaState | None:
    return replicas[seat % len(replicas)] if replicas else None


def _passing_on(
    places: Iterable[Sequence[ReplicaState]], version: int, now: float
) -> ReplicaState | None:
    """Return the first of these that passes a version on."""
    for replica in itertools.chain.from_iterable(places):
        if _will_have(replica, version) and _can_serve(replica, now):
            return replica
    return None


def _feeds(policy: ReplicaState, ranks: int) -> int:
    """How many chains of replicas with so many ranks a policy feeds as fast as one of them."""
    return max(1, len(policy.endpoints) // max(1, ranks))


def _policy_for(
    replica: ReplicaState, number: int, serving: Sequence[ReplicaState]
) -> ReplicaState:
    """Return the policy of a replica: of its own machine, that of its chain, or in turns."""
    here = [policy for policy in serving if policy.host == replica.host]
    if here or number < 0:
        choice = here or serving
        return choice[replica.seat % len(choice)]
    counts = [_feeds(policy, len(replica.endpoints)) for policy in serving]
    feeders = [
        policy
        for turn in range(max(counts))
        for policy, count in zip(serving, counts, strict=True)
        if turn < count
    ]
    return feeders[number % len(feeders)]


def _has(replica: ReplicaState, version: int) -> bool:
    """Whether it was sent this version: weights that it was started with cannot be had from it."""
    return replica.version == version and replica.has_loaded


def _will_have(replica: ReplicaState, version: int) -> bool:
    """Whether it was sent this version, or is being sent it."""
    return _has(replica, version) or (replica.loading == version and not replica.failed_loads)


def _can_serve(replica: ReplicaState, now: float) -> bool:
    return bool(replica.endpoints and not replica.leaving and now - replica.seen_s < _LIVELY_S)
