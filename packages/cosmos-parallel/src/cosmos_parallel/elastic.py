"""Data parallelism over replicas that come and go between steps.

    while step < num_steps:
        seat = replicas.meet(learner, step)     # who is there; who is behind gets a peer's state
        step = seat.step
        batches = share_of(step, seat.index, seat.size)
        try:
            report = learner.step(batches, loss)
        except ReplicaLostError:
            replicas.lose()                     # void for all of them: the same step again
            continue
        step += 1

A step is taken by all members of its epoch or by none, on all the data of the step: the losses are
those of replicas that never change, whoever dies and joins.
"""

import json
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace

import torch
from torch._C._distributed_c10d import Store

from cosmos_core.lineage import is_on_line
from cosmos_parallel.errors import FallenBackError, ReplicaLostError
from cosmos_parallel.learner import Learner
from cosmos_parallel.membership import Attendance, Attendee, ElasticConfig, Membership
from cosmos_parallel.mesh import TrainingMesh
from cosmos_parallel.peer_state import receive_state, send_state
from cosmos_parallel.process import broadcast_bytes
from cosmos_parallel.replicas import ReplicaMembership, StoreReplicaGroup

_LOG = logging.getLogger(__name__)
_NO_STATE = -1
_LOADED = -1
_MOST_ATTEMPTS = 10
_LOOK_S = 0.2
_SEATED = "seated"


@dataclass(frozen=True, kw_only=True, slots=True)
class Seat:
    """This replica's place in the step to come.

    Attributes:
        step: which step that is.
        index: position among the members.
        names: of the members.
        line: of the weights that all members have.
        healed_by: the member whose state was taken over just now; empty if none.
        wants_stop: whether a member was asked to end; the same on all of them.
    """

    step: int
    index: int
    names: tuple[str, ...]
    line: tuple[int, ...] = ()
    healed_by: str = ""
    wants_stop: bool = False

    @property
    def size(self) -> int:
        """Number of members."""
        return len(self.names)


class ElasticReplicas:
    """The other replicas of a learner, as they are before each step."""

    def __init__(
        self,
        membership: Membership | None,
        store: Store,
        mesh: TrainingMesh,
        config: ElasticConfig,
    ) -> None:
        """Nobody is met yet.

        Args:
            membership: on rank 0 of this replica; ``None`` on its other ranks.
            store: of the meeting place, opened by this rank for itself.
            mesh: the ranks of this replica; every replica has as many, in the same layout.
            config: how long to wait for whom.
        """
        self._membership = membership
        self._store = store
        self._mesh = mesh
        self._config = config
        self._group: StoreReplicaGroup | None = None
        self._epoch: int | None = None
        self._num_lost = 0
        self._has_state = True
        self._seated: tuple[int, int] | None = None  # step, epoch
        self._taken_in = _LOADED

    def meet(
        self,
        learner: Learner,
        step: int,
        *,
        wants_stop: bool = False,
        line: tuple[int, ...] = (),
    ) -> Seat:
        """Settle who takes the next step, and on which state; every rank of the replica calls.

        A replica that is behind the others is given model, optimizer and schedule by one that is
        not. Those who come during a long step wait for the ones who take it, as long as one of
        these is alive, and say so every ``timeout_s``. Two may have taken the same step
        apart, if the others had given one up meanwhile: then those go on who took it in the newest
        epoch, and help the other. The learner's replica group is exchanged if the members are
        others than before.

        Args:
            learner: of this replica.
            step: the step it would take.
            wants_stop: whether this replica was asked to end; as rank 0 says.
            line: of its weights, where replicas fall back to checkpoints while others hang.

        Raises:
            FallenBackError: if the others have fallen back from weights that this one has.
            ReplicaLostError: if there was no quorum in time, or no member has a usable state.
        """
        failure: ReplicaLostError | None = None
        if self._seated is not None and step > self._seated[0]:
            self._taken_in = self._seated[1]
        for _ in range(_MOST_ATTEMPTS):
            attendance, name = self._attend(step, line, wants_stop=wants_stop)
            index = attendance.names.index(name)
            newest = max(attendee.step for attendee in attendance.attendees)
            if newest == _NO_STATE:
                raise ReplicaLostError(f"none of {', '.join(attendance.names)} has a usable state")
            if failure := _find_lost(attendance, name):
                self.lose()
                continue
            healed_by = ""
            try:
                learner.replica_group = self._group_of(attendance, index)
                healed_by = self._catch_up(learner, attendance, index, learner.replica_group)
            except ReplicaLostError as error:
                failure = error
            if self._agree(ok=failure is None):
                self._has_state = True
                self._seated = (newest, attendance.epoch)
                if index == 0 and self._membership is not None:
                    self._store.set(_SEATED, json.dumps([attendance.names, attendance.line]))
                return Seat(
                    step=newest,
                    line=attendance.line,
                    index=index,
                    names=attendance.names,
                    healed_by=healed_by,
                    wants_stop=any(a.wants_stop for a in attendance.attendees),
                )
            self.lose()
        raise failure or ReplicaLostError(f"{_MOST_ATTEMPTS} attempts to meet the others failed")

    def lose(self) -> None:
        """Note that a step was lost; ``meet`` then makes new connections. Every rank calls."""
        if self._group is not None:
            self._group.close()
        self._group = None
        self._epoch = None
        self._num_lost += 1

    def claim(self, task: str, is_done: Callable[[], bool]) -> bool:
        """Settle who does a task that one replica does for all; every rank of the replica calls.

        It takes no quorum: whoever is left does it. One that dies at it is followed by another.

        Args:
            task: its name; a task is claimed once in the life of a meeting place.
            is_done: whether another has done it; asked on rank 0.

        Returns:
            True at once on the replica that is to do it, False on others when it is done.

        Raises:
            ReplicaLostError: if the one that does it is alive but not done in ``timeout_s``.
        """
        told = None
        if self._membership is not None:
            told = b"mine" if self._is_mine(self._membership, task, is_done) else b"done"
        return broadcast_bytes(told) == b"mine"

    def once(self, task: str, do: Callable[[], None]) -> None:
        """Have one of the replicas do a task for all; every rank of the replica calls.

        Returns when it is done, whoever died at it; or if the one that does it is alive and not
        done in ``timeout_s``: then it goes on without who waited.

        Args:
            task: its name; it is done once in the life of a meeting place.
            do: does it from its beginning, whatever one that died has left of it.
        """
        key, deadline = f"done/{task}", time.monotonic() + self._config.timeout_s
        if self.claim(task, lambda: self._store.check([key]) or time.monotonic() > deadline):
            do()
            if self._membership is not None:
                self._store.set(key, self._membership.name)

    def close(self) -> None:
        """Leave the others; may be called twice."""
        if self._group is not None:
            self._group.close()
        self._group = None
        if self._membership is not None:
            self._membership.close()

    def _attend(
        self, step: int, line: tuple[int, ...], *, wants_stop: bool
    ) -> tuple[Attendance, str]:
        """Ask for a quorum on rank 0, and tell the other ranks."""
        told = None
        if self._membership is not None:
            me = Attendee(
                name=self._membership.name,
                step=step if self._has_state else _NO_STATE,
                taken_in=self._taken_in,
                line=line,
                num_lost=self._num_lost,
                wants_stop=wants_stop,
            )
            attendance = self._settle(self._membership, me)
            told = json.dumps([asdict(attendance), self._membership.name]).encode()
        found, name = json.loads(broadcast_bytes(told))
        parsed = [Attendee(**said) for said in found["attendees"]]
        attendees = tuple(replace(attendee, line=tuple(attendee.line)) for attendee in parsed)
        return Attendance(epoch=found["epoch"], attendees=attendees), str(name)

    def _settle(self, membership: Membership, me: Attendee) -> Attendance:
        """Ask for a quorum until it is none of newcomers while others take a step.

        After ``join_s`` the Lighthouse gives those who asked a quorum of their own, if they are
        more than half of all who are alive; to fewer it gives none. So a newcomer goes on asking,
        however long the step, as long as one of those who take it shows signs of life.

        Raises:
            ReplicaLostError: if there was no quorum in time, and nobody takes a step.
        """
        for name in self._seated_last()[0]:
            membership.is_alive(name)  # what is heard of it from now on is new
        told = time.monotonic()
        while True:
            try:
                attendance = membership.attend(me)
                others = self._seated_apart(membership, attendance.names, attendance.line)
                if not others:
                    return attendance
            except ReplicaLostError:
                others = self._seated_apart(membership, (me.name,), me.line)
                if not others:
                    raise
            time.sleep(self._config.lease_s)
            if time.monotonic() - told >= self._config.timeout_s:
                told = time.monotonic()
                _LOG.warning("%s waits for %s, who take a step", me.name, ", ".join(others))

    def _seated_apart(
        self, membership: Membership, names: Sequence[str], line: Sequence[int]
    ) -> list[str]:
        """Return those who sat last and are alive, unless one is among those named.

        They are none if they have been fallen back from, so that their line is the shorter one.
        """
        seated, their_line = self._seated_last()
        if set(seated) & set(names) or len(line) > len(their_line):
            return []
        return [name for name in seated if membership.is_alive(name)]

    def _seated_last(self) -> tuple[list[str], list[int]]:
        """Return the members that met last, and the line of their weights."""
        if not self._store.check([_SEATED]):
            return [], []
        names, line = json.loads(self._store.get(_SEATED))
        return names, line

    def _group_of(self, attendance: Attendance, index: int) -> StoreReplicaGroup:
        if self._group is not None and self._epoch == attendance.epoch:
            return self._group
        if self._group is not None:
            self._group.close()
        process = self._mesh.process
        members = ReplicaMembership(
            names=attendance.names,
            index=index,
            epoch=attendance.epoch,
            rank=process.rank,
            num_ranks=process.world_size,
        )
        self._epoch = attendance.epoch
        self._group = StoreReplicaGroup(
            self._store,
            members,
            timeout_s=self._config.timeout_s,
            commit_timeout_s=self._config.lease_s,
            device_type=process.device_type,
            is_alive=self._is_alive,
        )
        return self._group

    def _is_mine(self, membership: Membership, task: str, is_done: Callable[[], bool]) -> bool:
        key, me = f"task/{task}", membership.name
        holder = self._store.compare_set(key, "", me).decode()
        seen = begun = time.monotonic()
        while holder != me:
            if is_done():
                return False
            now = time.monotonic()
            if membership.is_alive(holder):
                seen = now
            elif now - seen > self._config.lease_s:
                holder = self._store.compare_set(key, holder, me).decode()
            if now - begun > self._config.timeout_s:
                raise ReplicaLostError(
                    f"{me} waited {self._config.timeout_s:g} s for {holder}, which is alive and "
                    f"has not done what it took on: {task}"
                )
            time.sleep(_LOOK_S)
        return True

    def _is_alive(self, name: str) -> bool:
        # ranks but the first do not watch: they are told by its decision
        return self._membership is None or self._membership.is_alive(name)

    def _catch_up(
        self, learner: Learner, attendance: Attendance, index: int, group: StoreReplicaGroup
    ) -> str:
        """Bring all members to the newest step; return who helped this one, if anybody."""
        states = [(attendee.step, attendee.taken_in) for attendee in attendance.attendees]
        newest = max(states)
        holders = [place for place, state in enumerate(states) if state == newest]
        behind = [place for place, state in enumerate(states) if state < newest]
        healed_by = ""
        for turn, place in enumerate(behind):
            holder = holders[turn % len(holders)]
            if index == holder:
                send_state(learner, group, place)
            elif index == place:
                self._has_state = False  # until all of it is here
                receive_state(learner, group, holder)
                self._taken_in = newest[1]
                healed_by = attendance.names[holder]
        return healed_by

    def _agree(self, *, ok: bool) -> bool:
        """Whether it went well on every rank of this replica; all of them call."""
        failed = torch.tensor(int(not ok), device=self._mesh.process.device)
        return not self._mesh.max_(failed).item()


def _find_lost(attendance: Attendance, name: str) -> ReplicaLostError | None:
    """Look for members whose weights the others have fallen back from; these meet again without.

    Raises:
        FallenBackError: if ``name`` is one of them.
    """
    line = attendance.line
    lost = tuple(
        attendee.name
        for attendee in attendance.attendees
        if not is_on_line(line, len(attendee.line), attendee.step)
    )
    if name in lost:
        raise FallenBackError(
            f"{name} has weights that {', '.join(attendance.names)} fell back from, by way of "
            f"versions {line}; it begins again"
        )
    what = f"{', '.join(lost)} hung, and still has weights that the others fell back from"
    return ReplicaLostError(what, lost) if lost else None
