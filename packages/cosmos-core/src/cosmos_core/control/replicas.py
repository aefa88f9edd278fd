"""The replicas that are thought alive: who has room, who is silent, who serves which weights."""

import heapq
from collections.abc import Callable

from cosmos_core.control.config import ControllerConfig
from cosmos_core.control.state import (
    FAILURES_ALLOWED,
    UNKNOWN_VERSION,
    ControllerState,
    ReplicaState,
)
from cosmos_core.messages import (
    GroupFailed,
    GroupFinished,
    PublicationSkipped,
    ReplicaJoined,
    VersionLoaded,
    VersionPublished,
)

_STALE_ENTRIES = 4
_RELOAD_AFTER_S = 1.0
_FIRST_REST_S = 0.5
_LONGEST_REST_S = 30.0


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
        self._slots: dict[int, int] = {}
        for replica in state.rollouts():
            self._count_slots(replica, 1)
        self._sort()

    def add(self, event: ReplicaJoined, now: float) -> ReplicaState:
        """Register a replica."""
        counters = self._state.counters
        served = event.version if event.published is None else event.published
        replica = ReplicaState(
            name=event.replica,
            role=event.role,
            slots=event.slots,
            version=event.version,
            endpoints=event.endpoints,
            incarnation=event.incarnation,
            seat=counters.replicas_joined,
            seen_s=now,
            host=event.host,
            joined_s=now,
            published=served if event.role == "policy" else UNKNOWN_VERSION,
        )
        counters.replicas_joined += 1
        self._state.silent.pop(replica.name, None)
        self._state.replicas[replica.name] = replica
        if replica.role == "policy":
            self._state.policy_names.append(replica.name)
        self._count_slots(replica, 1)
        self._note_empty(replica)
        self._enter(replica)
        return replica

    def remove(self, name: str) -> ReplicaState | None:
        """Forget a replica, and that it was silent."""
        self._state.silent.pop(name, None)
        if name in self._state.policy_names:
            self._state.policy_names.remove(name)
        replica = self._state.replicas.pop(name, None)
        if replica is not None:
            self._count_slots(replica, -1)
        return replica

    def occupy(self, replica: ReplicaState, change: int) -> None:
        """Note that a replica holds one group more or less."""
        replica.busy += change
        self._note_empty(replica)
        self._enter(replica)

    def fill(self, replica: ReplicaState, now: float) -> float:
        """Note that a replica holds one group more; return for how long it was withheld.

        That is the time since it could have been given one and held none.
        """
        since_s = replica.empty_since_s
        self.occupy(replica, 1)
        return now - since_s if since_s >= 0 else 0.0

    def take_back(
        self, replica: ReplicaState, event: GroupFinished | GroupFailed, now: float
    ) -> None:
        """Note that a replica has answered for one group it held, and after how long first."""
        if isinstance(event, GroupFinished) and replica.first_group_s < 0:
            replica.first_group_s = now - replica.joined_s
        self.occupy(replica, -1)

    def set_version(self, replica: ReplicaState, version: int) -> None:
        """Note which weights a replica holds."""
        self._count_slots(replica, -1)
        replica.version = version
        if version == UNKNOWN_VERSION:
            replica.endpoints = ()  # what it has there may be of a lost lineage
        replica.failed_loads, replica.load_failure = 0, ""
        self._count_slots(replica, 1)
        self._note_empty(replica)
        self._enter(replica)

    def note_publication(
        self, policy: ReplicaState, event: VersionPublished | PublicationSkipped
    ) -> None:
        """Note which weights a policy serves, or that it has newer ones which it does not serve."""
        if isinstance(event, VersionPublished):
            policy.published = max(policy.published, event.version)
            if policy.published >= policy.skipped_version:
                policy.held_by = ""
        elif event.version > max(policy.published, policy.skipped_version):
            policy.skipped_version, policy.held_by = event.version, event.held_by
            policy.skipped += 1
            self._state.counters.publications_skipped += 1

    def note_load(self, replica: ReplicaState, event: VersionLoaded) -> None:
        """Note which weights a replica has loaded, from whom, and where it serves them."""
        counters = self._state.counters
        counters.loads += 1
        counters.loads_from_rollouts += bool(replica.loading_from)
        replica.loading_from, replica.has_loaded = "", True
        replica.endpoints = event.endpoints
        self.set_version(replica, event.version)

    def note_failed_load(self, replica: ReplicaState, reason: str, now: float) -> None:
        """Note why a replica could not load the weights that it was told to, which it is again."""
        replica.failed_loads += 1
        replica.load_failure = reason
        replica.retry_at_s = now + _RELOAD_AFTER_S

    def set_leaving(self, replica: ReplicaState, *, is_leaving: bool) -> None:
        """Note that a replica is to be given nothing more, or that it may stay after all."""
        if replica.leaving != is_leaving:
            replica.leaving = is_leaving
            self._enter(replica)

    def note_answer(
        self, replica: ReplicaState, event: GroupFinished | GroupFailed, now: float
    ) -> None:
        """Have a replica rest, each time for twice as long, if nothing comes of its groups.

        Without it a broken engine, which always has room, would be given every prompt there is.
        What is wrong with a prompt is no fault of who says so, nor is a reward that gives no sample
        a number, whoever has sampled it: a run of that ends soon.
        """
        replica.last_failure = reason = failure_of(event)
        if not reason or self._is_fault_of_rewards(event):
            if replica.failures:
                replica.failures, replica.resting = 0, False
                self._enter(replica)
            return
        if replica.resting or (isinstance(event, GroupFailed) and event.drop_as):
            return  # resting, it was given this group before
        replica.failures += 1
        extra = replica.failures - FAILURES_ALLOWED
        if extra >= 0:
            replica.resting = True
            replica.rest_until_s = now + min(_FIRST_REST_S * 2.0**extra, _LONGEST_REST_S)

    def _is_fault_of_rewards(self, event: GroupFinished | GroupFailed) -> bool:
        own, limits = self._state.endurance, self._config.endurance
        if isinstance(event, GroupFailed):
            return False
        ends_soon = own.is_row_of_all if own.has_reward else bool(limits.unrewarded_samples)
        return ends_soon and all(sample.unrewarded_by for sample in event.samples)

    def wake(self, now: float) -> None:
        """End the rests that are over."""
        for replica in self._state.rollouts():
            if replica.resting and now >= replica.rest_until_s:
                replica.resting = False
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

    def share(
        self, replica: ReplicaState, room: int, is_allowed: Callable[[int], bool], kept: int
    ) -> int:
        """Return how many of ``room`` groups are a replica's, by slots.

        While others are about to have weights that may be sampled with, prompts are kept for them:
        whoever has the weights first would otherwise be given everything. Not for those with
        ``kept`` slots, who keep weights that may not.
        """
        total = sum(self._slots.values()) - kept
        if total <= room:
            return replica.slots  # enough for everybody
        allowed = sum(count for version, count in self._slots.items() if is_allowed(version))
        return replica.slots if allowed == total else -(-room * replica.slots // total)

    def _note_empty(self, replica: ReplicaState) -> None:
        """Note since when a replica could be given groups and holds none; it was just heard of."""
        if replica.busy or replica.version == UNKNOWN_VERSION:
            replica.empty_since_s = -1.0
        elif replica.empty_since_s < 0:
            replica.empty_since_s = replica.seen_s

    def _count_slots(self, replica: ReplicaState, change: int) -> None:
        if replica.role == "rollout":
            count = self._slots.get(replica.version, 0) + change * replica.slots
            self._slots[replica.version] = count
            if not count:
                del self._slots[replica.version]

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


def failure_of(event: GroupFinished | GroupFailed) -> str:
    """Why nothing came of a group; empty if one sample did."""
    if isinstance(event, GroupFailed):
        return event.reason
    if any(sample.status == "completed" for sample in event.samples):
        return ""
    return next((sample.failure for sample in event.samples), "")
