"""The training groups in flight: their transitions, and counts that make every decision cheap.

issue ─► waiting ─dispatch► generating ─accept► ready ─take► training ─consume► gone
            ▲                   │                                  │
            └──────retry────────┘ (attempt + 1)      drop, reissue ─┴─► gone, waiting
"""

import heapq

from cosmos_core.control.config import ControllerConfig
from cosmos_core.control.endurance import Endurance
from cosmos_core.control.staleness import Load
from cosmos_core.control.state import (
    UNKNOWN_VERSION,
    ControllerState,
    GroupStage,
    GroupState,
)
from cosmos_core.control.unusable import note_unusable, note_usable
from cosmos_core.messages import GroupFailed, GroupFinished, SampleRef

_MOST_KINDS = 50
_LONGEST_KIND = 100


class GroupTable:
    """All changes to ``state.groups`` go through here; what it counts follows from the state.

    Attributes:
        garbage: keys of payloads that nobody reads again, until somebody takes them.
    """

    def __init__(
        self, state: ControllerState, config: ControllerConfig, endurance: Endurance
    ) -> None:
        """Count what is there."""
        self.garbage: list[str] = []
        self._endurance = endurance
        self._state = state
        self._config = config
        self._stages: dict[str, int] = {"waiting": 0, "generating": 0, "ready": 0, "training": 0}
        self._due: dict[str, dict[int, int]] = {"generating": {}, "ready": {}}
        self._waiting: list[int] = []
        self._held: dict[str, set[int]] = {}
        for group in state.groups.values():
            self._count(group, 1)

    # ---------------------------------------------------------------- looking

    @property
    def stages(self) -> dict[str, int]:
        """How many groups are in each stage."""
        return dict(self._stages)

    def load(self) -> Load:
        """Return what the staleness policy decides on."""
        state = self._state
        return Load(
            state.step + (state.training is not None),
            self._config.groups_per_step,
            self._due["generating"],
            self._due["ready"],
        )

    def deadline(self, version: int) -> int:
        """Return the last step that may train on tokens of a version."""
        return version + self._config.staleness.bound

    def dispatched(self) -> list[GroupState]:
        """Return groups that are being sampled or ready."""
        groups = self._state.groups.values()
        return [group for group in groups if group.stage in {"generating", "ready"}]

    def held_by(self, replica: str) -> list[GroupState]:
        """Return the groups that a replica samples, in order of ordinal."""
        return [self._state.groups[ordinal] for ordinal in sorted(self._held.get(replica, ()))]

    def answered(self, event: GroupFinished | GroupFailed) -> GroupState | None:
        """Return the group that an event is the awaited answer for; count it if there is none."""
        group = self._state.groups.get(event.group.ordinal)
        if (
            group is None
            or group.stage != "generating"
            or group.attempt != event.attempt
            or group.replica != event.replica
        ):
            self._state.counters.duplicates += 1
            return None
        return group

    def room(self) -> int:
        """Return how many groups the depth allows to be sampled at once now."""
        state, config = self._state, self._config
        steps = min(config.staleness.depth + 1, config.num_steps - state.step)
        done = self._stages["ready"] + self._stages["training"]
        return max(0, steps * config.groups_per_step - done)

    # ---------------------------------------------------------------- changing

    def next_prompt(self) -> GroupState | None:
        """Return a group to give out if the depth allows it: one that waits, else a new one.

        More may wait than that, as when policy replicas have fallen back by many steps.
        """
        room = self.room()
        if self._stages["generating"] >= room:
            return None
        while self._waiting:
            group = self._state.groups.get(self._waiting[0])
            if group is not None and group.stage == "waiting":
                return group
            heapq.heappop(self._waiting)
        state = self._state
        if self._stages["waiting"] + self._stages["generating"] >= room:
            return None
        group = GroupState(ordinal=state.next_ordinal)
        state.next_ordinal += 1
        state.counters.issued += 1
        self._add(group)
        return group

    def dispatch(self, group: GroupState, replica: str, version: int, now: float) -> None:
        """Note that a waiting group was given to a replica that holds a version, or a newer one."""
        self._count(group, -1)
        group.stage, group.replica = "generating", replica
        group.version, group.since_s = version, now
        self._count(group, 1)

    def accept(self, group: GroupState, samples: tuple[SampleRef, ...], now: float) -> None:
        """Take the samples of a group in: it is ready, tried again, or dropped for no signal."""
        completed = [sample for sample in samples if sample.status == "completed"]
        counters = self._state.counters
        counters.samples_failed += len(samples) - len(completed)
        for sample in samples:
            if sample.status != "completed":
                _count_failure(counters.failures, sample.failure)
        counters.generated_samples += len(completed)
        counters.generated_tokens += sum(sample.num_tokens for sample in completed)
        needed = min(self._config.min_group_samples, self._config.samples_per_group)
        self._endurance.note_samples(samples)
        if len(completed) < needed:
            failures = [sample.failure for sample in samples if sample.status != "completed"]
            self._endurance.note_failed(next(iter(failures), "too few samples"))
            self.discard(samples)
            self.retry(group)
            return
        note_usable(self._state)
        self._endurance.note_sampled()
        self._count(group, -1)
        group.stage, group.since_s, group.samples = "ready", now, samples
        versions = [sample.oldest_version for sample in completed if sample.num_tokens]
        group.version = min(versions, default=group.version)
        self._count(group, 1)
        if self._config.drop_zero_signal and len({s.reward for s in completed}) == 1:
            self.drop(group, "no signal")
            self._endurance.note_equal(self._stages["generating"])
        else:
            self._state.equal_in_a_row = 0

    def give_up(self, group: GroupState, event: GroupFailed) -> None:
        """Drop a group if its prompt is at fault, or have it sampled again."""
        if not event.drop_as:
            self._endurance.note_failed(event.reason)
            self.retry(group)
            return
        self.drop(group, event.drop_as)
        note_unusable(self._state, event, self._stages["generating"])

    def retry(self, group: GroupState) -> None:
        """Have a group sampled again, or drop it after its last attempt."""
        self._state.counters.retries += 1
        if group.attempt - group.first_attempt + 1 >= self._config.max_attempts:
            self.drop(group, "attempts used up")
        else:
            self.reset(group)

    def reset(self, group: GroupState) -> None:
        """Forget what was sampled; the group waits for another attempt."""
        self._count(group, -1)
        self.discard(group.samples)
        group.stage, group.replica, group.samples = "waiting", "", ()
        group.version = UNKNOWN_VERSION
        group.attempt += 1
        self._count(group, 1)

    def drop(self, group: GroupState, reason: str) -> None:
        """Give a group up, and count it."""
        self._remove(group)
        dropped = self._state.counters.dropped
        dropped[reason] = dropped.get(reason, 0) + 1

    def move(self, group: GroupState, stage: GroupStage) -> None:
        """Move a group between ready and training."""
        self._count(group, -1)
        group.stage = stage
        self._count(group, 1)

    def consume(self, group: GroupState) -> None:
        """Close the books on a group that was trained on."""
        self._remove(group)
        if group.attempt:
            self._state.attempts_used[group.ordinal] = group.attempt
        self._state.counters.consumed += 1

    def reissue(self, ordinal: int) -> None:
        """Take back that a group was consumed: the weights it made are lost.

        What its attempts have sampled is deleted, so a rollout replica must not take the new one
        for one of these and report it again.
        """
        attempt = self._state.attempts_used.pop(ordinal, 0) + 1
        self._state.counters.consumed -= 1
        self._add(GroupState(ordinal=ordinal, attempt=attempt, first_attempt=attempt))

    def discard(self, samples: tuple[SampleRef, ...]) -> None:
        """Have payloads deleted."""
        self.garbage.extend(sample.key for sample in samples if sample.key)

    def discard_late(self, event: GroupFinished) -> None:
        """Have late samples deleted, unless they are the very ones that were taken in before."""
        group = self._state.groups.get(event.group.ordinal)
        kept = {sample.key for sample in group.samples} if group else set[str]()
        self.discard(tuple(s for s in event.samples if s.key not in kept))

    # ---------------------------------------------------------------- counting

    def _add(self, group: GroupState) -> None:
        self._state.groups[group.ordinal] = group
        self._count(group, 1)

    def _remove(self, group: GroupState) -> None:
        self._count(group, -1)
        self.discard(group.samples)
        del self._state.groups[group.ordinal]

    def _count(self, group: GroupState, change: int) -> None:
        self._stages[group.stage] += change
        if group.stage in self._due:
            due = self._due[group.stage]
            deadline = self.deadline(group.version)
            due[deadline] = due.get(deadline, 0) + change
            if not due[deadline]:
                del due[deadline]
        if group.stage == "waiting" and change > 0:
            heapq.heappush(self._waiting, group.ordinal)
        elif group.stage == "generating":
            held = self._held.setdefault(group.replica, set())
            (held.add if change > 0 else held.discard)(group.ordinal)
            if not held:
                del self._held[group.replica]


def _count_failure(failures: dict[str, int], failure: str) -> None:
    """Count ``"reward mine: ValueError: the reward is nan"`` under its first two parts."""
    kind = ": ".join(failure.split(": ")[:2])[:_LONGEST_KIND]
    if kind not in failures and len(failures) >= _MOST_KINDS:
        kind = "others"
    failures[kind] = failures.get(kind, 0) + 1
