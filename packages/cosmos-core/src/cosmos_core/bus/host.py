"""The loop around the controller: read events, let it decide, commit, repeat.

acquire lease ─► recall log ─► ┌─ read events ─► handle each ─► commit ─┐ ─► finished
                               └───────────────◄────────────────────────┘
"""

import functools
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from cosmos_core.bus.code_version import code_version, difference, other_log
from cosmos_core.bus.connection import Bus
from cosmos_core.bus.errors import CodeVersionError, RunLostError
from cosmos_core.bus.ledger import Commit, Dispatch, Ledger, Logged, Past, Reported
from cosmos_core.control import Controller, ControllerConfig, StepStats, ValidationResult
from cosmos_core.control.payloads import is_over
from cosmos_core.control.rounds import SOURCE, figures_of
from cosmos_core.control.served import ServedTimes
from cosmos_core.messages import (
    Command,
    Event,
    Progress,
    ReplicaJoined,
    ReplicaLeft,
    Tick,
    VersionLoaded,
    decode_event,
    encode_message,
)
from cosmos_core.metrics import MetricRecord

_STATUS_EVERY_S = 0.5
_LONGEST_TURN_S = 1.0
_MOST_REFUSED = 100


@dataclass(frozen=True, kw_only=True, slots=True)
class HostConfig:
    """How a controller is run.

    Attributes:
        owner: its name; a process that is started again under the same name need not wait for
            the lease of the one before, a standby has a name of its own.
        lease_s: without a sign of life for so long, another owner may take over.
        tick_s: longest time between two looks at leases.
        snapshot_every: commits between snapshots, which bound the log.
        is_begun: a controller of this run has committed before, so that Redis has to know it.
    """

    owner: str = "controller"
    lease_s: float = 5.0
    tick_s: float = 0.5
    snapshot_every: int = 500
    is_begun: bool = False

    def __post_init__(self) -> None:
        """Refuse a lease that would run out between two ticks.

        Raises:
            ValueError: if ``lease_s`` is not at least four times ``tick_s``.
        """
        if not 0 < 4 * self.tick_s <= self.lease_s:
            raise ValueError(
                f"lease_s is {self.lease_s} and tick_s {self.tick_s}; "
                "want 0 < 4 * tick_s <= lease_s"
            )


class Journal(Protocol):
    """Follows what a controller takes in and orders; it must not block, and must not raise."""

    def begin(self, epoch: int) -> None:
        """Called once, when this controller has the lease: the run is its own from here on."""
        ...

    def note(
        self, *, time_s: float, epoch: int, events: Sequence[Event], dispatches: Sequence[Dispatch]
    ) -> None:
        """Called after each commit with what it made true; ``time_s`` is since the epoch."""
        ...


class ControllerHost:
    """Runs the controller of one run until the run has ended.

    The controller's clock counts only the time in which a controller runs and reaches Redis: after
    an outage nobody is declared dead for a silence that was ours.
    """

    def __init__(
        self,
        bus: Bus,
        config: ControllerConfig,
        *,
        cut: bytes = b"",
        host: HostConfig | None = None,
        journal: Journal | None = None,
    ) -> None:
        """Nothing is read or taken yet; ``run`` does.

        Args:
            bus: the run.
            config: what the controller is told; the same after every restart.
            cut: the sample stream of a checkpoint, for a run that has no log yet.
            host: how it is run.
            journal: follows it, for people; nothing is recovered from it.
        """
        self._bus = bus
        self._config = config
        self._cut = cut
        self._host = host if host is not None else HostConfig()
        self._journal = journal
        self._now = 0.0
        self._turned = 0.0
        self._ticked = 0.0
        self._status_at = float("-inf")
        self._refused: dict[str, str] = {}
        self._served = ServedTimes()

    async def run(self) -> str:
        """Control the run to its end; return why it ended.

        Raises:
            LeaseHeldError: if another controller runs; try again later, as a standby does.
            FencedError: if another controller took over.
            RunLostError: if Redis has lost what was committed.
            CodeVersionError: if the log of a controller of another version cannot be read.
            BusUnreachableError: if Redis stays away.
        """
        ledger = await Ledger.acquire(self._bus, owner=self._host.owner, lease_s=self._host.lease_s)
        past = await ledger.recall()
        if past.state is None and self._host.is_begun:
            await ledger.release()
            raise RunLostError(self._bus.address, self._bus.keys.namespace)
        try:
            controller = self._replay(past)
        except msgspec.DecodeError as error:  # those of validation, too
            await ledger.release()
            told = other_log(self._bus.keys.namespace, past.code, code_version())
            raise CodeVersionError(f"{told} ({error})") from error
        # A run begins with a snapshot, so that a cut given to a later start is not mistaken for it.
        is_new = past.state is None
        await ledger.commit(Commit(cursor="", snapshot=controller.snapshot() if is_new else b""))
        await ledger.sweep(functools.partial(is_over, controller.state))
        if self._journal is not None and not controller.finished:
            self._journal.begin(ledger.token)
        self._turned = time.monotonic()
        while not controller.finished:
            events = await ledger.read(wait_s=self._host.tick_s)
            await self._turn(ledger, controller, events)
        await self._write_status(controller, ledger)
        await ledger.release()
        return controller.finished

    def _replay(self, past: Past) -> Controller:
        if past.state is not None:
            controller = Controller.restore(self._config, past.state)
        elif self._cut:
            controller = Controller.from_cut(self._config, self._cut)
        else:
            controller = Controller(self._config)
        for logged in past.events:
            event = decode_event(logged.data)
            controller.handle(event, logged.now)
            self._served.note(event, logged.now)
        controller.take_garbage()
        controller.take_stats()
        self._now = past.now
        self._ticked = past.now
        return controller

    async def _turn(
        self, ledger: Ledger, controller: Controller, events: Sequence[Reported]
    ) -> None:
        self._advance_clock()
        turn = _Turn(controller, self._now, self._refused)
        for reported in events:
            turn.take_in(reported)
        if self._now - self._ticked >= self._host.tick_s:
            self._ticked = self._now
            turn.handle(Tick())
        if not turn.logged and not events:
            return
        is_due = ledger.log_length + 1 >= self._host.snapshot_every
        stats = controller.take_stats()
        queues = controller.books().in_flight if stats else {}
        await ledger.commit(
            Commit(
                cursor=events[-1].entry if events else "",
                events=turn.logged,
                dispatches=turn.dispatches,
                garbage=controller.take_garbage(),
                snapshot=controller.snapshot() if is_due and turn.logged else b"",
                metrics=[
                    *(_record_of(s, self._host.owner, queues) for s in stats),
                    *self._loads_among(turn.events),
                ],
            )
        )
        if not ledger.log_length:
            await ledger.sweep(functools.partial(is_over, controller.state))
        self._note(ledger, turn)
        if self._now - self._status_at >= _STATUS_EVERY_S:
            await self._write_status(controller, ledger)

    def _loads_among(self, events: Sequence[Event]) -> list[MetricRecord]:
        """Return the seconds until each replica served what it has loaded."""
        found: list[MetricRecord] = []
        for event in events:
            served_s = self._served.note(event, self._now)
            if isinstance(event, VersionLoaded) and served_s is not None:
                values = {"served_s": served_s}
                record = MetricRecord(time.time(), "rollout", event.replica, event.version, values)
                found.append(record)
        return found

    def _note(self, ledger: Ledger, turn: "_Turn") -> None:
        if self._journal is not None:
            self._journal.note(
                time_s=time.time(),
                epoch=ledger.token,
                events=turn.events,
                dispatches=turn.dispatches,
            )

    def _advance_clock(self) -> None:
        turned = time.monotonic()
        self._now += min(turned - self._turned, _LONGEST_TURN_S)
        self._turned = turned

    async def _write_status(self, controller: Controller, ledger: Ledger) -> None:
        self._status_at = self._now
        status: dict[str, Any] = {
            "time_s": time.time(),
            "epoch": ledger.token,
            "refused": self._refused,
            **controller.status(self._now),
        }
        for name, replica in status["replicas"].items():
            replica |= self._served.last(name)
        await self._bus.write_status(status)


class _Turn:
    """The events of one commit and what follows from them."""

    def __init__(self, controller: Controller, now: float, refused: dict[str, str]) -> None:
        self.logged: list[Logged] = []
        self.events: list[Event] = []
        self.dispatches: list[Dispatch] = []
        self._controller = controller
        self._now = now
        self._refused = refused

    def take_in(self, reported: Reported) -> None:
        """Hand an event to the controller, unless its sender is not who we think it is."""
        teller, ours = reported.replica or "somebody", code_version()
        if reported.code != ours:
            said = difference(teller, reported.code, ours)
            self._refuse(reported, said, left="runs other code")
            return
        try:
            event = decode_event(reported.data)
        except msgspec.DecodeError as error:  # those of validation, too
            said = f"{teller} reported what is no event: {error}; the run goes on without it"
            self._refuse(reported, said, left="reported what is no event")
            return
        if isinstance(event, ReplicaJoined):
            self._refused.pop(event.replica, None)
        if reported.replica and not isinstance(event, ReplicaJoined):
            known = self._controller.incarnation_of(reported.replica)
            if known != reported.incarnation:
                self._answer_stranger(reported, known, event)
                return
        self.handle(event, reported.data)

    def handle(self, event: Event, data: bytes = b"") -> None:
        """Let the controller take an event in."""
        self.events.append(event)
        self.logged.append(Logged(self._now, data or encode_message(event)))
        for replica, command in self._controller.handle(event, self._now):
            self._dispatch(replica, command)

    def _dispatch(self, replica: str, command: Command) -> None:
        incarnation = self._controller.incarnation_of(replica)
        if incarnation is not None:
            self.dispatches.append(
                Dispatch(replica=replica, incarnation=incarnation, command=command)
            )

    def _refuse(self, reported: Reported, reason: str, *, left: str) -> None:
        """Turn away who runs other code, unread, as its messages may mean something else here.

        Or whose messages are none, of whom no later one can be awaited.

        Args:
            reported: what it said.
            reason: why, for it and for people.
            left: the same in a few words, if it had joined.
        """
        if len(self._refused) < _MOST_REFUSED:
            self._refused[reported.replica] = reason
        if not reported.replica:
            return
        if self._controller.incarnation_of(reported.replica) == reported.incarnation:
            # it joined, maybe a controller of its own code, which was started again with another
            self.handle(ReplicaLeft(replica=reported.replica, reason=left))
        self.dispatches.append(
            Dispatch(
                replica=reported.replica,
                incarnation=reported.incarnation,
                notice="refused",
                about=reason,
            )
        )

    def _answer_stranger(self, reported: Reported, known: str | None, event: Event) -> None:
        if isinstance(event, ReplicaLeft):
            return
        if known is None and not isinstance(event, Progress) and self._controller.finished:
            return
        self.dispatches.append(
            Dispatch(
                replica=reported.replica,
                incarnation=reported.incarnation,
                notice="rejoin" if known is None else "superseded",
                about=reported.entry,
            )
        )


def _record_of(
    stats: StepStats | ValidationResult, owner: str, queues: Mapping[str, int]
) -> MetricRecord:
    """Return a step's figures, and how many groups were at each stage when it was committed.

    Those of a validation have the version that answered for their step.
    """
    if isinstance(stats, ValidationResult):
        return MetricRecord(time.time(), SOURCE, SOURCE, stats.version, figures_of(stats))
    values = {
        name: float(value)
        for name, value in msgspec.structs.asdict(stats).items()
        if name != "step"
    }
    values |= {f"queue_{stage}": float(count) for stage, count in queues.items()}
    return MetricRecord(time.time(), "controller", owner, stats.step, values)
