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
little later than the first (decision 0376).
"""

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence

from cosmos_core.control.state import UNKNOWN_VERSION, ControllerState, ReplicaState
from cosmos_core.messages import LoadVersion

_LIVELY_S = 5.0
"""A rollout replica silent for longer may hang: others would wait for it for a minute."""
_TRIES = 4
"""So many replicas of a machine, and machines before it, are looked at for one that passes on."""
_ANYWHERE = None

Holders = Mapping[str | None, Sequence[ReplicaState]]
"""Who has a version whole and serves it, by machine; all of them under ``_ANYWHERE``."""


class LoadOrders:
    """Gives the orders; keeps nothing that could not be made anew from the state."""

    def __init__(self, state: ControllerState) -> None:
        """Nothing is looked at yet."""
        self._state = state
        self._made_of = (-1, -1)
        self._machines: list[list[str]] = []
        self._numbers: dict[str, int] = {}

    def give(
        self, names: Iterable[str], now: float, is_pinned: Callable[[ReplicaState], bool]
    ) -> list[tuple[str, LoadVersion]]:
        """Return the orders to those of the named rollout replicas that can follow one now.

        One that is loading is asked again when it is done; one that failed, after a pause; one that
        is pinned keeps its version. One that has loaded nothing yet is sent to a rollout replica
        that serves the version, so that a newcomer costs the policy nothing; the others, who want
        it at the same time, to one that is being sent it; who failed to load, to the policy.
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
        has_newcomers = any(not replica.has_loaded for replica in ready)
        holders = self._holders_of(target, now) if has_newcomers else {}
        return [(r.name, self._order(r, serving, holders, now)) for r in ready]

    def _order(
        self, replica: ReplicaState, serving: Sequence[ReplicaState], holders: Holders, now: float
    ) -> LoadVersion:
        holder = None
        number = -1
        if replica.failed_loads == 0 and not replica.has_loaded:
            holder = _nearest(replica, holders)
        elif replica.failed_loads == 0 and (number := self._number_of(replica.host)) >= 0:
            ranks = len(replica.endpoints)
            holder = self._before(replica, number, sum(_feeds(p, ranks) for p in serving), now)
        replica.loading_from = holder.name if holder else ""
        return LoadVersion(
            version=replica.loading,
            endpoints=(holder or _policy_for(replica, number, serving)).endpoints,
            lineage=len(self._state.line),
            holder=replica.loading_from,
        )

    def _holders_of(self, version: int, now: float) -> Holders:
        holders: dict[str | None, list[ReplicaState]] = {_ANYWHERE: []}
        for replica in self._state.rollouts():
            if replica.version == version and _can_serve(replica, now):
                holders[_ANYWHERE].append(replica)
                holders.setdefault(replica.host, []).append(replica)
        return holders

    def _before(
        self, replica: ReplicaState, number: int, step: int, now: float
    ) -> ReplicaState | None:
        """Return who passes the version on to a replica of the machine with this number.

        It is before the replica in the order of machines, or on its own, and has its order already
        or gets it in the same turn: so nobody waits for somebody that waits for it.
        """
        own = self._machines[number]
        places = [own[: own.index(replica.name)]]
        places += [self._machines[n] for n in range(number - step, -1, -step)[:_TRIES]]
        for name in itertools.chain.from_iterable(place[:_TRIES] for place in places):
            other = self._state.replicas[name]
            if _will_have(other, replica.loading) and _can_serve(other, now):
                return other
        return None

    def _number_of(self, machine: str) -> int:
        """Return a machine's place in the order of who joined first; -1 if it has policies."""
        made_of = self._state.counters.replicas_joined, len(self._state.replicas)
        if made_of != self._made_of:  # somebody came or went
            machines: dict[str, list[ReplicaState]] = {}
            for rollout in self._state.rollouts():
                machines.setdefault(rollout.host, []).append(rollout)
            for policy in self._state.policies():
                machines.pop(policy.host, None)
            by_seat = [sorted(each, key=lambda rollout: rollout.seat) for each in machines.values()]
            by_seat.sort(key=lambda each: each[0].seat)
            self._machines = [[rollout.name for rollout in each] for each in by_seat]
            self._numbers = {each[0].host: number for number, each in enumerate(by_seat)}
            self._made_of = made_of
        return self._numbers.get(machine, -1)


def _nearest(newcomer: ReplicaState, holders: Holders) -> ReplicaState | None:
    """Return who else has the version: of the same machine if any is, each in its turn."""
    found = holders.get(newcomer.host) or holders[_ANYWHERE]
    return found[newcomer.seat % len(found)] if found else None


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


def _will_have(replica: ReplicaState, version: int) -> bool:
    """Whether it has this version, or is being sent it in the place of an older one.

    One that may still have weights of a lost lineage would give those away.
    """
    if replica.version == version:
        return True
    return replica.loading == version and replica.version >= 0 and not replica.failed_loads


def _can_serve(replica: ReplicaState, now: float) -> bool:
    return bool(replica.endpoints and not replica.leaving and now - replica.seen_s < _LIVELY_S)
