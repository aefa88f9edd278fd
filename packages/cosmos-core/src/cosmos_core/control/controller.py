"""The controller: a pure fold over events that decides who does what next.

No sockets, no clock, no chance: ``handle(event, now)`` changes the state and returns commands, so
that the same events give the same state in a test, in a replay of the log and in the run.

A training prompt's life, each arrow one event or one command::

    issued ─► waiting ─Generate► generating ─GroupFinished► ready ─Train► training ─► consumed
                 ▲                   │ replica lost, failed                  (all StepFinished)
                 └───────────────────┘ attempt + 1          or ─► dropped, by reason
"""

from typing import Any

import msgspec

from cosmos_core.control import rounds
from cosmos_core.control.books import Books, books_of
from cosmos_core.control.config import ControllerConfig
from cosmos_core.control.cut import cut_of, state_from_cut
from cosmos_core.control.ending import STOPPED, Ending
from cosmos_core.control.endurance import Endurance
from cosmos_core.control.groups import GroupTable
from cosmos_core.control.held_up import HeldUp
from cosmos_core.control.loads import LoadOrders
from cosmos_core.control.replicas import ReplicaTable
from cosmos_core.control.scaling import ask, dismiss
from cosmos_core.control.state import (
    UNKNOWN_VERSION,
    ControllerState,
    ReplicaState,
    StepStats,
    ValidationResult,
)
from cosmos_core.control.status import status_of, waiting_for
from cosmos_core.control.steps import Steps
from cosmos_core.lineage import is_of_lost_weights, is_on_line
from cosmos_core.messages import (
    CancelGroup,
    CheckpointSaved,
    Command,
    Event,
    FallBack,
    Generate,
    GroupFailed,
    GroupFinished,
    LoadFailed,
    Progress,
    PublicationSkipped,
    ReplicaJoined,
    ReplicaLeft,
    ScaleRequested,
    StepFinished,
    StopRequested,
    Tick,
    VersionLoaded,
    VersionPublished,
)

Addressed = tuple[str, Command]
_WORK = (Progress, GroupFinished, GroupFailed, StepFinished, VersionLoaded)


class Controller:
    """Decides; never waits and never does.

    Attributes:
        config: what it was told about the run.
        state: everything it knows; only ``handle`` changes it.
    """

    def __init__(self, config: ControllerConfig, state: ControllerState | None = None) -> None:
        """Start a run, or go on from a state that a controller of the same config had."""
        self.config = config
        self.state = state if state is not None else ControllerState()
        self._endurance = Endurance(self.state, config.endurance)
        self._groups = GroupTable(self.state, config, self._endurance)
        self._replicas = ReplicaTable(self.state, config)
        self._rounds = rounds.Rounds(self.state, config, self._replicas, self._endurance)
        self._steps = Steps(self.state, config, self._groups, self._endurance)
        self._held_up = HeldUp(self.state, self._steps, self._replicas, self._rounds)
        self._ending = Ending(self.state, config, self._steps, self._rounds)
        self._commands: list[Addressed] = []
        self._behind: set[str] = set()
        self._loads = LoadOrders(self.state)

    @classmethod
    def from_cut(cls, config: ControllerConfig, cut: bytes) -> "Controller":
        """Go on with the sample stream of a checkpoint; unfinished prompts are issued again first.

        Raises:
            msgspec.ValidationError: if ``cut`` is not what ``cut()`` returned.
        """
        return cls(config, state_from_cut(cut))

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

    def cut(self) -> bytes:
        """Return the sample stream at the end of the step in hand, or now if there is none."""
        return cut_of(self.state)

    # ---------------------------------------------------------------- looking in

    @property
    def finished(self) -> str:
        """Why the run has ended; empty while it goes on."""
        return self.state.finished

    @property
    def validations(self) -> dict[int, ValidationResult]:
        """What validations found, by weight version."""
        return {result.version: result for result in self.state.rounds_done}

    def books(self) -> Books:
        """Return what became of every prompt issued."""
        return books_of(self.state, self._groups.stages)

    def incarnation_of(self, replica: str) -> str | None:
        """Return which process of a replica's name is meant by it now; none if it is unknown."""
        found = self.state.replicas.get(replica)
        return None if found is None else found.incarnation

    def status(self, now: float) -> dict[str, Any]:
        """Return what a person wants to know, as plain data."""
        return status_of(self.state, self.config, self.books(), now)

    def waiting_for(self, now: float) -> str:
        """Say in one line what the run waits for, by name."""
        return waiting_for(self.state, self.config, now)

    def take_garbage(self) -> list[str]:
        """Return keys of payloads that nobody will read again, once."""
        garbage, self._groups.garbage = self._groups.garbage, []
        return garbage

    def take_stats(self) -> list[StepStats | ValidationResult]:
        """Return the figures of steps and validations that ended since the last call."""
        return [*self._steps.take_stats(), *self._rounds.take_results()]

    # ---------------------------------------------------------------- taking in

    def handle(self, event: Event, now: float) -> list[Addressed]:
        """Take one event in and return the commands that follow, each with its replica.

        Events may be delivered twice and late: what is not waited for changes nothing. Those of a
        replica that is not known change nothing either, until it joins (again). Once the run has
        ended only farewells are heard: who has not said one may have to be waited for.

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
        elif isinstance(event, ReplicaLeft):
            self._replicas.remove(event.replica)
        return self._commands

    def _take_in(self, event: Event, now: float) -> None:
        match event:
            case Tick():
                for name in self._replicas.silent(now):
                    self._lose(name, "silent")
                    self.state.silent[name] = now
                self._replicas.wake(now)
                self._behind.update(self.state.replicas)
                self._endurance.tick(now, self._steps.at_work, lambda: self.waiting_for(now))
            case StopRequested():
                self.state.stopping = self.state.stopping or event.reason or STOPPED
            case ScaleRequested():
                ask(self.state, self.config, event)
            case ReplicaJoined():
                self._join(event, now)
            case ReplicaLeft():
                self._lose(event.replica, event.reason)
            case _:
                replica = self.state.replicas.get(event.replica)
                if replica is not None:
                    replica.seen_s = now
                    replica.worked = replica.worked or isinstance(event, _WORK)
                    self._hear(replica, event, now)
                elif isinstance(event, GroupFinished):
                    self._groups.discard(event.samples)

    def _hear(self, replica: ReplicaState, event: Event, now: float) -> None:
        if is_of_lost_weights(event, self.state.line):
            self.state.counters.reports_lost += 1
            return
        match event:
            case GroupFinished() | GroupFailed():
                self._answer(replica, event, now)
            case StepFinished():
                self._steps.finish(replica, event.step, now)
            case VersionPublished() | PublicationSkipped():
                self._replicas.note_publication(replica, event)
                self._behind.update(self.state.replicas)
            case VersionLoaded() | LoadFailed():
                self._loaded(replica, event, now)
            case CheckpointSaved():
                self._ending.hear(replica, event)
            case _:
                pass

    def _join(self, event: ReplicaJoined, now: float) -> None:
        known = self.state.replicas.get(event.replica)
        if known is not None and event.incarnation and known.incarnation == event.incarnation:
            known.seen_s = now
            return  # the same word twice
        self._lose(event.replica, "joined again")
        replica = self._replicas.add(event, now)
        if replica.role == "rollout" and not self._steps.surely_has(replica.version):
            self._replicas.set_version(replica, UNKNOWN_VERSION)
        is_on = is_on_line(self.state.line, event.lineage, event.version)
        is_lost = replica.role == "policy" and not is_on
        if is_lost:
            replica.version = replica.published = UNKNOWN_VERSION
        if self.state.stop is not None:
            self._commands.extend(self._ending.orders_for(replica, now))
        elif is_lost:
            self._commands.append((replica.name, self._fall_back()))
        elif replica.role == "rollout":
            self._behind.add(replica.name)
        else:
            self._settle(replica, now)

    def _lose(self, name: str, reason: str) -> None:
        if (replica := self._replicas.remove(name)) is None:
            return
        if reason != STOPPED:
            self.state.counters.replicas_lost += 1
            self._endurance.note_death(replica, reason)
        for group in self._groups.held_by(name):
            self._endurance.note_failed(f"{name}: {reason}")
            self._groups.retry(group)
        self._rounds.give_back(replica)

    def _answer(
        self, replica: ReplicaState, event: GroupFinished | GroupFailed, now: float
    ) -> None:
        self._replicas.note_answer(replica, event, now)
        if event.group.source == rounds.SOURCE:
            self._rounds.take_in(event)
            self._behind.add(replica.name)
            if isinstance(event, GroupFinished):
                self._groups.discard(event.samples)
            return
        group = self._groups.answered(event)
        if group is not None:
            self._replicas.take_back(replica, event, now)
        if isinstance(event, GroupFailed):
            if group is not None:
                self._groups.give_up(group, event)
        elif group is None:
            self._groups.discard_late(event)
        elif self._may_be_of_lost_weights(replica, event):
            self._groups.discard(event.samples)
            self._groups.reset(group)
        else:
            self._groups.accept(group, event.samples, now)

    def _may_be_of_lost_weights(self, replica: ReplicaState, event: GroupFinished) -> bool:
        """Whether tokens are of other weights than were ordered, whose number may exist twice."""
        newest = max(
            (s.newest_version for s in event.samples if s.status == "completed"), default=0
        )
        is_ordered = newest <= replica.version or newest == replica.loading
        return not is_ordered and not self._steps.surely_has(newest)

    # ---------------------------------------------------------------- weights

    def _loaded(self, replica: ReplicaState, event: VersionLoaded | LoadFailed, now: float) -> None:
        # newer weights than ordered may be those of a policy replica that has yet to fall back
        is_on = is_on_line(self.state.line, event.lineage, event.version)
        is_sure = event.version == replica.loading or self._steps.surely_has(event.version)
        is_answer = is_on and UNKNOWN_VERSION < replica.loading <= event.version
        self._behind.add(replica.name)
        if is_answer:
            replica.loading = UNKNOWN_VERSION
        else:
            self.state.counters.duplicates += 1
        if isinstance(event, LoadFailed):
            if is_answer:
                self.state.counters.loads_failed += 1
                self._replicas.note_failed_load(replica, event.reason, now)
        elif not (is_on and is_sure):
            self._forget_samples_of(replica)
        elif is_answer or UNKNOWN_VERSION < replica.version < event.version:
            # or it was ordered before the replica was taken for dead, and joined again
            self._replicas.note_load(replica, event)

    def _settle(self, joined: ReplicaState, now: float) -> None:
        """Find out from a policy replica that joined which step the run is at."""
        held, training, step = self._steps.versions_held(), self.state.training, self.state.step
        if len(self.state.policies()) < self.config.policies_needed:
            return
        if training is not None and held <= {step, step + 1}:
            if step + 1 not in held and not self.config.min_policies:
                self._forget_weights_after(step)
            self._steps.commit_if_done(now)
            self._commands.extend(self._steps.orders_for(joined))
        elif len(held) == 1 and (newest := max(held)) < step:
            if newest >= self.state.saved:
                self._forget_weights_after(newest)
                self._steps.rewind(newest, now)
            self._commands.extend((p.name, self._fall_back()) for p in self.state.policies())
        elif len(held) == 1 and (newest := max(held)) > step:
            self._steps.skip_to(newest, now)

    def _fall_back(self) -> FallBack:
        return FallBack(line=self.state.line, saved=self.state.saved)

    def _forget_weights_after(self, version: int) -> None:
        """Policy replicas fell back to a version: later ones, and their samples, are lost."""
        state = self.state
        for replica in state.rollouts():
            # also if it only loads: it is given that version or a newer one, which may be lost, and
            # might sample with it before it says so
            if replica.version > version or replica.loading != UNKNOWN_VERSION:
                replica.loading = UNKNOWN_VERSION
                self._forget_samples_of(replica)
        self._commands.extend(self._rounds.forget_after(version))
        self._steps.reset_after(version)
        state.lineage_from = version if state.lineage_from < 0 else min(state.lineage_from, version)
        self._behind.update(state.replicas)

    def _forget_samples_of(self, replica: ReplicaState) -> None:
        """Have all that a rollout replica samples taken again: its weights are lost, or unknown."""
        self._replicas.set_version(replica, UNKNOWN_VERSION)
        for group in self._groups.held_by(replica.name):
            self._replicas.occupy(replica, -1)
            cancel = CancelGroup(group=group.group, attempt=group.attempt)
            self._commands.append((replica.name, cancel))
            self._groups.reset(group)
        self._commands.extend(self._rounds.take_back(replica.name))

    def _order_loads(self, now: float) -> None:
        """Look only at replicas for which something has changed, and at all of them with a tick."""
        if self._behind:
            behind, self._behind = sorted(self._behind), set[str]()
            self._commands.extend(self._loads.give(behind, now, self._rounds.pins()))

    # ---------------------------------------------------------------- what follows

    def _advance(self, now: float) -> None:
        self._steps.drop_expired()
        if self._ending.is_due:
            self._commands.extend(self._ending.begin(now))
            self._ending.finish_if_done()
            return
        if not self.state.stopping:
            if self._steps.form(now) is not None:
                self._commands.extend(self._steps.orders(self.state.policies()))
            self._rounds.open_if_due(now)
            self._commands.extend(self._rounds.give_out(self._steps.may_dispatch))
            if self._rounds.take_let_go():
                self._behind.update(self.state.replicas)
            self._commands.extend(dismiss(self.state, self._replicas))
            self._give_out(now)
            self._held_up.note(now)
        self._order_loads(now)

    def _give_out(self, now: float) -> None:
        """Give prompts to the replicas with the most free slots while staleness allows it."""
        if self._rounds.blocks_training:
            return
        may_train = self._steps.may_dispatch
        while (replica := self._replicas.with_room(may_train)) is not None:
            kept = self._rounds.kept_slots(may_train)
            if replica.busy >= self._replicas.share(replica, self._groups.room(), may_train, kept):
                return
            group = self._groups.next_prompt()
            if group is None:
                return
            self._groups.dispatch(group, replica.name, min(replica.version, self.state.step), now)
            generate = Generate(
                group=group.group,
                attempt=group.attempt,
                num_samples=self.config.samples_per_group,
                withheld_s=self._replicas.fill(replica, now),
            )
            self._commands.append((replica.name, generate))
