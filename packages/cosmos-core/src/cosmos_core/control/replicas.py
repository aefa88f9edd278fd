"""The replicas that are thought alive: who has room, who is silent, who serves which weights."""

import heapq
from collections.abc import Callable

from cosmos_core.control.config import ControllerConfig
from cosmos_core.control.state import (
    UNKNOWN_VERSION,
    ControllerState,
    ReplicaState,
)
from cosmos_core.messages import ReplicaJoined

_STALE_ENTRIES = 4


class ReplicaTable:
    """All changes to ``state.replicas`` go through here; finds room without looking at everybody.

    Rollout replicas lie in heaps by weight version, the one with the most free slots on top. An
    entry that no longer tells the truth is thrown away when it comes up.
    """

    def __init__(self, state: ControllerState, config: ControllerConfig) -> None:
        """Sort what is there."""
        self._state = state
        self._config = config
        self._room: dict[int, list[tuple[int, str]]] = {}
        self._num_entries = 0
        self._sort()

    def add(self, event: ReplicaJoined, now: float) -> ReplicaState:
        """Register a replica."""
        counters = self._state.counters
        replica = ReplicaState(
            name=event.replica,
            role=event.role,
            slots=event.slots,
            version=event.version,
            endpoints=event.endpoints,
            incarnation=event.incarnation,
            seat=counters.replicas_joined,
            seen_s=now,
            published=event.version if event.role == "policy" else UNKNOWN_VERSION,
        )
        counters.replicas_joined += 1
        self._state.replicas[replica.name] = replica
        if replica.role == "policy":
            self._state.policy_names.append(replica.name)
        self._enter(replica)
        return replica

    def remove(self, name: str) -> ReplicaState | None:
        """Forget a replica."""
        if name in self._state.policy_names:
            self._state.policy_names.remove(name)
        return self._state.replicas.pop(name, None)

    def occupy(self, replica: ReplicaState, change: int) -> None:
        """Note that a replica holds one group more or less."""
        replica.busy += change
        self._enter(replica)

    def set_version(self, replica: ReplicaState, version: int) -> None:
        """Note which weights a replica holds."""
        replica.version = version
        self._enter(replica)

    def silent(self, now: float) -> list[str]:
        """Return replicas whose lease has run out."""
        config = self._config
        return [
            replica.name
            for replica in self._state.replicas.values()
            if now - replica.seen_s > (config.lease_s if replica.worked else config.first_lease_s)
        ]

    def with_room(self, is_allowed: Callable[[int], bool]) -> ReplicaState | None:
        """Return the rollout replica with the most free slots among those of allowed versions."""
        best: ReplicaState | None = None
        for version in sorted(self._room, reverse=True):
            top = self._top(version)
            if top is None or version == UNKNOWN_VERSION or not is_allowed(version):
                continue
            if best is None or (-top.free, top.name) < (-best.free, best.name):
                best = top
        return best

    def _top(self, version: int) -> ReplicaState | None:
        heap = self._room[version]
        while heap:
            free, name = heap[0]
            replica = self._state.replicas.get(name)
            if replica and replica.free == -free and replica.version == version:
                return replica
            heapq.heappop(heap)
            self._num_entries -= 1
        del self._room[version]
        return None

    def _enter(self, replica: ReplicaState) -> None:
        if replica.role == "rollout" and replica.free > 0:
            heap = self._room.setdefault(replica.version, [])
            heapq.heappush(heap, (-replica.free, replica.name))
            self._num_entries += 1
            if self._num_entries > _STALE_ENTRIES * len(self._state.replicas) + 64:
                self._sort()

    def _sort(self) -> None:
        self._room = {}
        for replica in self._state.rollouts():
            if replica.free > 0:
                self._room.setdefault(replica.version, []).append((-replica.free, replica.name))
        for heap in self._room.values():
            heapq.heapify(heap)
        self._num_entries = sum(len(heap) for heap in self._room.values())
