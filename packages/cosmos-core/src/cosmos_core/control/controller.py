"""The controller: a pure fold over events that decides who does what next.

No sockets, no clock, no chance: ``handle(event, now)`` changes the state and returns commands, so
that the same events give the same state in a test, in a replay of the log and in the run.

A training prompt's life, each arrow one event or one command::

    issued ─► waiting ─Generate► generating ─GroupFinished► ready ─Train► training ─► consumed
                 ▲                   │ replica lost, failed          │
                 └───────────────────┘         (attempt + 1)         └─► dropped, by reason
"""

from dataclasses import asdict
from typing import Any

import msgspec

from cosmos_core.control import admission, rounds
from cosmos_core.control.books import Books, books_of
from cosmos_core.control.config import ControllerConfig
from cosmos_core.control.state import (
    UNKNOWN_VERSION,
    ControllerState,
    Cut,
    GroupState,
    ReplicaState,
    StepState,
    StepStats,
    ValidationResult,
    parse_group,
)
from cosmos_core.messages import (
    CheckpointSaved,
    Command,
    Event,
    Generate,
    GroupFailed,
    GroupFinished,
    GroupId,
    LoadFailed,
    LoadVersion,
    Progress,
    ReplicaJoined,
    ReplicaLeft,
    StepFinished,
    Stop,
    StopRequested,
    Tick,
    Train,
    VersionLoaded,
    VersionPublished,
)

TRAIN = "train"
ALL_DONE = "all steps done"
Addressed = tuple[str, Command]
_RELOAD_AFTER_S = 1.0


class Controller:
    """Decides; never waits and never does.

    Attributes:
        state: everything it knows; only ``handle`` changes it.
    """

    def __init__(self, config: ControllerConfig, state: ControllerState | None = None) -> None:
        """Start a run, or go on from a state that a controller of the same config had."""
        self.config = config
        self.state = state if state is not None else ControllerState()
        self._commands: list[Addressed] = []
        self._garbage: list[str] = []
        self._stats: list[StepStats] = []

    @classmethod
    def from_cut(cls, config: ControllerConfig, cut: bytes) -> "Controller":
        """Go on with the sample stream of a checkpoint; unfinished prompts are issued again first.

        Raises:
            msgspec.ValidationError: if ``cut`` is not what ``cut()`` returned.
        """
        read = msgspec.msgpack.decode(cut, type=Cut)
        state = ControllerState(step=read.step, next_ordinal=read.next_ordinal)
        for ordinal in read.unfinished:
            group = GroupId(TRAIN, 0, ordinal)
            state.groups[str(group)] = GroupState(group=group, attempt=1)
        counters = state.counters
        counters.issued = read.next_ordinal
        counters.dropped = dict(read.dropped)
        counters.consumed = read.next_ordinal - len(read.unfinished) - sum(read.dropped.values())
        state.rounds_done = list(read.rounds_done)
        return cls(config, state)

    @classmethod
    def restore(cls, config: ControllerConfig, snapshot: bytes) -> "Controller":
        """Read a whole state back.

        Raises:
            msgspec.ValidationError: if ``snapshot`` is not what ``snapshot()`` returned.
        """
        return cls(config, msgspec.msgpack.decode(snapshot, type=ControllerState))

    def snapshot(self) -> bytes:
        """Return the whole state as msgpack."""
        return msgspec.msgpack.encode(self.state)

    def books(self) -> Books:
        """Return what became of every prompt issued."""
        return books_of(self.state)

    @property
    def finished(self) -> str:
        """Why the run has ended; empty while it goes on."""
        return self.state.finished

    def take_garbage(self) -> list[str]:
        """Return keys of payloads that nobody will read again, once."""
        garbage, self._garbage = self._garbage, []
        return garbage

    def take_stats(self) -> list[StepStats]:
        """Return the statistics of steps committed since the last call."""
        stats, self._stats = self._stats, []
        return stats

    def handle(self, event: Event, now: float) -> list[Addressed]:
        """Take one event in and return the commands that follow, each with its replica.

        Events may be delivered twice and late: what is not waited for changes nothing.

        Args:
            event: what happened.
            now: seconds of any clock that never runs backwards over the life of a run.

        Raises:
            BooksError: if the books no longer balance, which is a fault of this class.
        """
        self._commands = []
        if not self.state.finished:
            self._take_in(event, now)
            self._advance(now)
            self.books().check()
        return self._commands

    def _take_in(self, event: Event, now: float) -> None:
        name = getattr(event, "replica", "")
        if name and not isinstance(event, ReplicaJoined):
            replica = self.state.replicas.get(name)
            if replica is None:
                return  # declared dead: the bus has it join again
            replica.seen_s = now
        match event:
            case ReplicaJoined():
                self._join(event, now)
            case ReplicaLeft():
                self._lose(event.replica, now, counts=event.reason != "stopped")
            case GroupFinished():
                self._finish_group(event, now)
            case GroupFailed():
                self._fail_group(event, now)
            case StepFinished():
                self._finish_step(event, now)
            case VersionPublished():
                self.state.published = max(self.state.published, event.version)
            case VersionLoaded():
                self._loaded(event)
            case LoadFailed():
                self._load_failed(event, now)
            case CheckpointSaved():
                self._saved(event)
            case StopRequested():
                self.state.stopping = self.state.stopping or event.reason
            case Progress():
                pass
            case Tick():
                self._expire_leases(now)

    # ---------------------------------------------------------------- replicas come and go

    def _join(self, event: ReplicaJoined, now: float) -> None:
        if event.replica in self.state.replicas:
            self._lose(event.replica, now, counts=False)
        self.state.replicas[event.replica] = ReplicaState(
            name=event.replica,
            role=event.role,
            slots=event.slots,
            version=event.version,
            endpoints=event.endpoints,
            incarnation=event.incarnation,
            seen_s=now,
        )
        if event.role == "policy" and event.version < self.state.step:
            self._rewind(event.version)
        if event.role == "policy":
            self.state.published = min(self.state.step, event.version)
            self.state.idle_since_s = now

    def _lose(self, name: str, now: float, *, counts: bool) -> None:
        replica = self.state.replicas.pop(name, None)
        if replica is None:
            return
        self.state.counters.replicas_lost += counts
        rounds.give_back(self.state, name)
        for group in self.state.groups.values():
            if group.stage == "generating" and group.replica == name:
                self._retry(group)
        if replica.role == "policy":
            self._void_step(now)

    def _expire_leases(self, now: float) -> None:
        silent = [
            replica.name
            for replica in self.state.replicas.values()
            if now - replica.seen_s > self.config.lease_s
        ]
        for name in silent:
            self._lose(name, now, counts=True)

    def _rewind(self, version: int) -> None:
        """Fall back to a policy's checkpoint: what was trained on since then is issued again."""
        for step in [s for s in self.state.consumed_since_save if s >= version]:
            for key in self.state.consumed_since_save.pop(step):
                self.state.groups[key] = GroupState(group=parse_group(key), attempt=1)
                self.state.counters.consumed -= 1
        self.state.step = version

    def _void_step(self, now: float) -> None:
        training = self.state.training
        if training is None:
            return
        self.state.counters.steps_void += 1
        for key in training.groups:
            self.state.groups[key].stage = "ready"
        self.state.training = None
        self.state.idle_since_s = now

    # ---------------------------------------------------------------- groups

    def _expected(self, event: GroupFinished | GroupFailed) -> GroupState | None:
        group = self.state.groups.get(str(event.group))
        if (
            group is None
            or group.stage != "generating"
            or group.attempt != event.attempt
            or group.replica != event.replica
        ):
            self.state.counters.duplicates += 1
            return None
        return group

    def _finish_group(self, event: GroupFinished, now: float) -> None:
        if event.group.source == rounds.SOURCE:
            rounds.record(self.state, event)
            self._garbage.extend(sample.key for sample in event.samples if sample.key)
            return
        group = self._expected(event)
        if group is None:
            self._garbage.extend(sample.key for sample in event.samples if sample.key)
            return
        completed = [sample for sample in event.samples if sample.status == "completed"]
        counters = self.state.counters
        counters.samples_failed += len(event.samples) - len(completed)
        counters.generated_samples += len(completed)
        counters.generated_tokens += sum(sample.num_tokens for sample in completed)
        group.samples = event.samples
        needed = min(self.config.min_group_samples, self.config.samples_per_group)
        if len(completed) < needed:
            self._discard_samples(group)
            self._retry(group)
        elif self.config.drop_zero_signal and len({s.reward for s in completed}) == 1:
            self._drop(str(group.group), "no signal")
        else:
            group.stage = "ready"
            group.since_s = now
            group.version = min(sample.oldest_version for sample in completed)

    def _fail_group(self, event: GroupFailed, now: float) -> None:
        del now
        if event.group.source == rounds.SOURCE:
            rounds.give_back(self.state, event.replica, [event.group.ordinal])
            return
        group = self._expected(event)
        if group is not None:
            self._retry(group)

    def _retry(self, group: GroupState) -> None:
        group.stage = "waiting"
        group.replica = ""
        group.version = UNKNOWN_VERSION
        group.attempt += 1
        self.state.counters.attempts += 1
        if group.attempt >= self.config.max_attempts:
            self._drop(str(group.group), "attempts used up")

    def _drop(self, key: str, reason: str) -> None:
        group = self.state.groups[key]
        self._discard_samples(group)
        # Marked, not deleted: callers may be iterating over the groups.
        group.stage = "waiting"
        group.replica = reason
        group.attempt = -1

    def _discard_samples(self, group: GroupState) -> None:
        self._garbage.extend(sample.key for sample in group.samples if sample.key)
        group.samples = ()

    def _sweep_dropped(self) -> None:
        dropped = self.state.counters.dropped
        for key in [k for k, g in self.state.groups.items() if g.attempt < 0]:
            reason = self.state.groups.pop(key).replica
            dropped[reason] = dropped.get(reason, 0) + 1

    # ---------------------------------------------------------------- steps and versions

    def _finish_step(self, event: StepFinished, now: float) -> None:
        training = self.state.training
        if training is None or event.step != training.step:
            return
        training.done.add(event.replica)
        if len(training.done) < self.config.num_policies:
            return
        self._stats.append(self._statistics(training, now))
        self.state.last_step = self._stats[-1]
        for key in training.groups:
            self._discard_samples(self.state.groups.pop(key))
        self.state.counters.consumed += len(training.groups)
        self.state.consumed_since_save[training.step] = list(training.groups)
        self.state.training = None
        self.state.step = training.step + 1
        self.state.idle_since_s = now

    def _statistics(self, training: StepState, now: float) -> StepStats:
        groups = [self.state.groups[key] for key in training.groups]
        samples = [s for g in groups for s in g.samples if s.status == "completed"]
        staleness = [training.step - group.version for group in groups]
        counters = self.state.counters
        return StepStats(
            step=training.step,
            reward=sum(sample.reward for sample in samples) / len(samples),
            staleness_mean=sum(staleness) / len(staleness),
            staleness_max=max(staleness),
            waited_s=training.since_s - self.state.idle_since_s,
            trained_s=now - training.since_s,
            trained_length=sum(sample.num_tokens for sample in samples) / len(samples),
            generated_length=counters.generated_tokens / max(1, counters.generated_samples),
        )

    def _loaded(self, event: VersionLoaded) -> None:
        replica = self.state.replicas[event.replica]
        replica.version = event.version
        replica.loading = UNKNOWN_VERSION

    def _load_failed(self, event: LoadFailed, now: float) -> None:
        replica = self.state.replicas[event.replica]
        replica.loading = UNKNOWN_VERSION
        replica.loading_since_s = now
        self.state.counters.loads_failed += 1

    def _saved(self, event: CheckpointSaved) -> None:
        for step in [s for s in self.state.consumed_since_save if s <= event.step]:
            del self.state.consumed_since_save[step]
        if self.state.stop_sent:
            self.state.replicas[event.replica].stopped = True

    # ---------------------------------------------------------------- what follows

    def _advance(self, now: float) -> None:
        self._sweep_dropped()
        for key in admission.too_stale(self.state, self.config):
            self._drop(key, "too stale")
        self._sweep_dropped()
        rounds.close_if_done(self.state)
        if self._is_over():
            self._stop()
            return
        if not self.state.stopping:
            self._form_step(now)
            if rounds.is_due(self.state, self.config):
                rounds.open_round(self.state, self.config)
            free = self._free_slots()
            self._commands.extend(rounds.give_out(self.state, free))
            self._give_out(free, now)
        self._order_loads(now)

    def _is_over(self) -> bool:
        if self.state.training is not None:
            return False
        if self.state.stopping:
            return True
        if self.state.step < self.config.num_steps or self.state.round is not None:
            return False
        return not rounds.is_final_missing(self.state, self.config)

    def _stop(self) -> None:
        if not self.state.stop_sent:
            self.state.stop_sent = True
            self.state.stopping = self.state.stopping or ALL_DONE
            stop = Stop(reason=self.state.stopping, cut=self.cut())
            self._commands.extend((name, stop) for name in self.state.replicas)
        policies = self._policies()
        if all(policy.stopped for policy in policies):
            self.state.finished = self.state.stopping

    def _policies(self) -> list[ReplicaState]:
        return [r for r in self.state.replicas.values() if r.role == "policy"]

    def _rollouts(self) -> list[ReplicaState]:
        return [r for r in self.state.replicas.values() if r.role == "rollout"]

    def _form_step(self, now: float) -> None:
        policies = self._policies()
        state = self.state
        if (
            state.training is not None
            or state.step >= self.config.num_steps
            or len(policies) < self.config.num_policies
        ):
            return
        keys = admission.choose_step(state, self.config)
        if keys is None:
            return
        for key in keys:
            state.groups[key].stage = "training"
        state.training = StepState(step=state.step, since_s=now, groups=tuple(keys))
        every = self.config.checkpoint_every
        is_due = every > 0 and (state.step + 1) % every == 0
        train = Train(
            step=state.step,
            groups=tuple(state.groups[key].samples for key in keys),
            publish=True,
            cut=self.cut() if is_due else b"",
        )
        self._commands.extend((policy.name, train) for policy in policies)

    def _free_slots(self) -> dict[str, int]:
        free = {r.name: r.slots for r in self._rollouts() if not r.stopped}
        for group in self.state.groups.values():
            if group.stage == "generating":
                free[group.replica] -= 1
        if self.state.round is not None:
            for name in self.state.round.given.values():
                free[name] -= 1
        return free

    def _give_out(self, free: dict[str, int], now: float) -> None:
        """Give prompts to the replica with the most free slots while staleness allows it."""
        if self.state.step >= self.config.num_steps:
            return
        if rounds.blocks_training(self.state, self.config):
            return
        names = [name for name, slots in free.items() if slots > 0]
        while names:
            name = max(names, key=lambda n: (free[n], n))
            version = min(self.state.replicas[name].version, self.state.step)
            if not admission.may_give_out(self.state, self.config, version):
                names.remove(name)
                continue
            group = self._next_prompt()
            if group is None:
                return
            group.stage, group.replica = "generating", name
            group.version, group.since_s = version, now
            self._commands.append(
                (
                    name,
                    Generate(
                        group=group.group,
                        attempt=group.attempt,
                        num_samples=self.config.samples_per_group,
                    ),
                )
            )
            free[name] -= 1
            if free[name] <= 0:
                names.remove(name)

    def _next_prompt(self) -> GroupState | None:
        waiting = [group for group in self.state.groups.values() if group.stage == "waiting"]
        if waiting:
            return min(waiting, key=lambda group: group.group)
        if not admission.may_issue(self.state, self.config):
            return None
        group = GroupState(group=GroupId(TRAIN, 0, self.state.next_ordinal))
        self.state.groups[str(group.group)] = group
        self.state.next_ordinal += 1
        self.state.counters.issued += 1
        return group

    def _order_loads(self, now: float) -> None:
        servers = [p.endpoints for p in self._policies() if p.version >= 0]
        if not servers or self.state.published < 0 or self.state.stopping:
            return
        for index, replica in enumerate(self._rollouts()):
            behind = replica.version != self.state.published
            idle = replica.loading < 0 and now >= replica.loading_since_s + (
                _RELOAD_AFTER_S if replica.loading_since_s else 0.0
            )
            if behind and idle and not rounds.pins(self.state, replica):
                replica.loading = self.state.published
                endpoints = servers[index % len(servers)]
                load = LoadVersion(version=self.state.published, endpoints=endpoints)
                self._commands.append((replica.name, load))

    # ---------------------------------------------------------------- looking in

    def waiting_for(self, now: float) -> str:
        """Say in one line what the run waits for, by name."""
        state, config = self.state, self.config
        if state.finished:
            return f"nothing: {state.finished}"
        missing = config.num_policies - len(self._policies())
        if missing > 0:
            return f"{missing} of {config.num_policies} policy replicas to join"
        if state.training is not None:
            slow = [p.name for p in self._policies() if p.name not in state.training.done]
            since_s = now - state.training.since_s
            return f"step {state.training.step} on {', '.join(slow)} for {since_s:.1f} s"
        if not self._rollouts():
            return "a rollout replica to join"
        if state.round is not None:
            left = len(state.round.waiting) + len(state.round.given)
            return f"{left} validation answers of version {state.round.version}"
        generating = [g for g in state.groups.values() if g.stage == "generating"]
        if generating:
            oldest = min(generating, key=lambda group: group.since_s)
            since_s = now - oldest.since_s
            return f"group {oldest.group} on {oldest.replica} for {since_s:.1f} s"
        behind = [r.name for r in self._rollouts() if r.version < state.published]
        return f"version {state.published} to load on {', '.join(behind)}" if behind else "events"

    def cut(self) -> bytes:
        """Return the sample stream at the end of the step in hand, or now if there is none."""
        state = self.state
        training = state.training
        in_step = set(training.groups) if training else set[str]()
        cut = Cut(
            step=state.step + (training is not None),
            next_ordinal=state.next_ordinal,
            unfinished=tuple(
                sorted(g.group.ordinal for key, g in state.groups.items() if key not in in_step)
            ),
            dropped=dict(state.counters.dropped),
            rounds_done=tuple(state.rounds_done),
        )
        return msgspec.msgpack.encode(cut)

    def incarnation_of(self, replica: str) -> str | None:
        """Return which process of a replica's name is meant by it now; none if it is unknown."""
        found = self.state.replicas.get(replica)
        return None if found is None else found.incarnation

    @property
    def validations(self) -> dict[int, ValidationResult]:
        """What validations found, by weight version."""
        return {result.version: result for result in self.state.rounds_done}

    def status(self, now: float) -> dict[str, Any]:
        """Return what a person wants to know, as plain data."""
        state = self.state
        return {
            "step": state.step,
            "num_steps": self.config.num_steps,
            "published": state.published,
            "finished": state.finished,
            "waiting_for": self.waiting_for(now),
            "books": asdict(self.books()),
            "counters": msgspec.to_builtins(state.counters),
            "validations": {str(r.version): msgspec.to_builtins(r) for r in state.rounds_done},
            "replicas": {
                r.name: {"role": r.role, "version": r.version, "silent_s": now - r.seen_s}
                for r in state.replicas.values()
            },
        }
