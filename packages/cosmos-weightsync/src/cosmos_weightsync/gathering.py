"""Sources that the directory knows: senders, and receivers that already have what is wanted."""

import time
from collections.abc import Collection, Iterable, Sequence
from typing import Literal

from cosmos_weightsync.attendance import Attendance
from cosmos_weightsync.deadlines import Deadline
from cosmos_weightsync.errors import (
    DeadlineError,
    PeerLostError,
    PlanError,
    TransferError,
    VersionError,
)
from cosmos_weightsync.joint_plans import JointPlan
from cosmos_weightsync.layout import Layout, ShardSpec
from cosmos_weightsync.membership import Member, View
from cosmos_weightsync.rosters import Found
from cosmos_weightsync.staging import Source, assign, assign_again, in_order

__all__ = ["DirectorySources", "Preference"]

Preference = Literal["senders", "receivers", "planned"]
SUSPECT_S = 30.0
"""A member found dead is not asked again for so long: by then its lease is over, or it lives."""
_LAYOUTS = "layouts"
"""Unreachable under this name, which is no endpoint, is what some members hold."""
_TOLD_S = 2.0
"""A directory that is there has told of a change by then."""


class DirectorySources:
    """A `cosmos_weightsync.rosters.Roster` that follows the directory.

    Args:
        attendance: This member's.
        prefer: Whom to plan with if both will do; the others stand in for them.
        find_timeout_s: How long to wait for anybody to be there.
    """

    def __init__(
        self, attendance: Attendance, prefer: Preference, *, find_timeout_s: float
    ) -> None:
        self._attendance = attendance
        self._prefer: Preference = prefer
        self._find_timeout_s = find_timeout_s
        self._suspects: dict[str, tuple[float, TransferError]] = {}
        self._suspected: dict[str, set[str]] = {}  # Ports are used again, by somebody else.
        self._was_complete = False
        self._from_receivers = False
        self._planned_for: frozenset[tuple[str, str]] = frozenset()
        self._joint: JointPlan | None = None

    def find(self, at_least: int, deadline: Deadline) -> Found:
        """Those of one run, all senders or all that have the version; waits until somebody is.

        Receivers of older versions are not waited for: they may wait for this one.

        Raises:
            DeadlineError: nobody is there, or those who are have older versions.
        """
        soon = deadline.within(self._find_timeout_s)
        self._attendance.wait_for(self._is_enough, soon)
        self._was_complete = True
        while True:
            view = self._with_version(at_least, deadline)
            found = self._found_in(view, at_least, deadline)
            # Whose lease was over comes again, as alive as before.
            if _LAYOUTS not in found.unreachable or not self._has_changed(view, soon):
                return found

    def _with_version(self, at_least: int, deadline: Deadline) -> View:
        try:
            return self._attendance.wait_for(lambda v: self._is_enough(v, at_least), deadline)
        except DeadlineError as error:
            raise DeadlineError(
                f"version {at_least}: no sender is in the directory, and receivers there are of "
                "older versions"
            ) from error

    def _found_in(self, view: View, at_least: int, deadline: Deadline) -> Found:
        """Those to plan with; some may have layouts that could not be had."""
        soon = deadline.within(self._find_timeout_s)
        chosen = self._chosen(view, at_least)
        self._from_receivers = all(member.role == "receiver" for member in chosen)
        trusted = [member for member in chosen if member.endpoint not in self._suspects]
        unreachable = {
            member.endpoint: self._suspects[member.endpoint][1]
            for member in chosen
            if member.endpoint in self._suspects
        }
        unreachable |= _missing(chosen)
        sources = self._sources_of(trusted, soon)
        if len(sources) < len(trusted):
            unreachable[_LAYOUTS] = PeerLostError("the directory no longer knows all layouts")
        others = self._others(view, chosen, at_least) if self._from_receivers else []
        return Found(sources, {}, unreachable, self._sources_of(others, soon))

    def _others(self, view: View, chosen: Sequence[Member], at_least: int) -> list[Member]:
        """Who else may have parts of what receivers have, of the same run of the trainer."""
        runs = {member.run_id for member in chosen}
        return [
            member
            for member in view.members
            if self._is_of_use(member)
            and member.run_id in runs
            and member.endpoint not in self._suspects
            and member not in chosen
            and (member.role == "sender" or member.version >= max(at_least, 0))
        ]

    def _has_changed(self, view: View, deadline: Deadline) -> bool:
        """Whether the directory, which tells at once, has another view than this one."""
        told = deadline.within(_TOLD_S)
        try:
            told.remaining("the directory")  # It may have another one each time.
            self._attendance.wait_for(lambda v: v.revision != view.revision, told)
        except DeadlineError:
            return False
        return True

    def instead(
        self, wanted: Sequence[ShardSpec], failed: Collection[str], version: int
    ) -> list[tuple[Source, Layout]]:
        """Plan over others: up the forest of a joint plan, else over all who might stand in.

        Raises:
            PlanError: they do not have all of it.
        """
        if self._joint is not None:
            try:
                return self._joint.instead_of({*failed, *self._suspects}, wanted)
            except PlanError:  # Somebody who is not in that plan may have it.
                self._joint = None
        members = [
            member
            for member in self._attendance.view.members
            if self._is_of_use(member) and member.endpoint not in {*failed, *self._suspects}
        ]
        soon = Deadline.after(self._find_timeout_s)
        return assign_again(wanted, self._sources_of(members, soon), version)

    def assign(self, wanted: Sequence[ShardSpec], found: Found) -> list[tuple[Source, Layout]]:
        """Plan for this receiver alone, or for its whole group with relays.

        Raises:
            PlanError: those who were found do not have all of it.
        """
        self._planned_for, self._joint = self._group_key(), None
        group = self._group() if self._prefer == "planned" else []
        mine = Layout.from_ranks([wanted])
        place = next((i for i, (_, is_me) in enumerate(group) if is_me), None)
        if place is None or group[place][0].layout.digest() != mine.digest():
            return _assigned(wanted, found)
        receivers = [source for source, _ in group]
        links = self._attendance.view.links
        self._joint = JointPlan(found.sources, receivers, place, links)
        return self._joint.shares()

    @property
    def chunk_bytes(self) -> int | None:
        """That of the joint plan, if receivers pass on by it."""
        return None if self._joint is None else self._joint.chunk_bytes

    def is_stale(self) -> bool:
        """Whether the group of a joint plan is another one now, or no sender was there then."""
        is_another = self._prefer == "planned" and self._planned_for != self._group_key()
        return is_another or self._from_receivers

    def _group_key(self) -> frozenset[tuple[str, str]]:
        return frozenset((member.id, member.layout) for member in self._peers())

    def _group(self) -> list[tuple[Source, bool]]:
        """The receivers that fetch together, in an order that all of them know."""
        sources = self._sources_of(self._peers(), Deadline.after(self._find_timeout_s))
        mine = next((m.endpoint for m in self._peers() if m.id == self._attendance.id), "")
        return [(source, source.endpoint == mine) for source in sources]

    def _peers(self) -> list[Member]:
        members = self._attendance.view.members
        me = next((m for m in members if m.id == self._attendance.id), None)
        if me is None:
            return []
        return [
            member
            for member in members
            if member.role == "receiver"
            and member.group == me.group
            and member.endpoint
            and member.layout
            and member.endpoint not in self._suspects
        ]

    def suspect(self, endpoint: str, error: TransferError) -> None:
        """Do without this one for a while."""
        self._suspects[endpoint] = (time.monotonic() + SUSPECT_S, error)
        members = self._attendance.view.members
        self._suspected[endpoint] = {m.id for m in members if m.endpoint == endpoint}

    def _is_enough(self, view: View, at_least: int = 0) -> bool:
        """The first time everybody must have come; later on those who are here will do."""
        chosen = self._chosen(view, at_least)
        return bool(chosen) and (self._was_complete or not _missing(chosen))

    def _chosen(self, view: View, at_least: int) -> list[Member]:
        """The members to plan with; none if those who are here cannot be enough."""
        now = time.monotonic()
        others = {
            m.endpoint for m in view.members if m.id not in self._suspected.get(m.endpoint, ())
        }
        self._suspects = {
            key: value
            for key, value in self._suspects.items()
            if value[0] > now and key not in others
        }
        of_use = [member for member in view.members if self._is_of_use(member)]
        senders = _newest_run([member for member in of_use if member.role == "sender"])
        have = [m for m in of_use if m.role == "receiver" and m.version >= max(at_least, 0)]
        newest = max((member.version for member in have), default=-1)
        have = [member for member in have if member.version == newest]
        first, second = (have, senders) if self._prefer == "receivers" else (senders, have)
        return next((some for some in (first, second) if self._has_living(some)), [])

    def _has_living(self, members: Iterable[Member]) -> bool:
        return any(member.endpoint not in self._suspects for member in members)

    def _is_of_use(self, member: Member) -> bool:
        return bool(member.endpoint and member.layout) and member.id != self._attendance.id

    def _sources_of(self, members: Iterable[Member], deadline: Deadline) -> list[Source]:
        found: list[Source] = []
        for member in members:
            try:
                layout = self._attendance.layout_of(member, deadline)
            except (VersionError, TransferError):  # Gone since, or the directory is.
                continue
            place = (member.role, member.rank, member.host, member.version)
            found.append(Source(member.endpoint, member.name, layout, *place))
        return in_order(found)


def _assigned(wanted: Sequence[ShardSpec], found: Found) -> list[tuple[Source, Layout]]:
    """Plan over those found, and over others only where these do not have all of it."""
    receivers = [source for source in found.others if source.role == "receiver"]
    try:
        return assign(wanted, found.sources)
    except PlanError:
        if not found.others:
            raise
    try:  # They are at different versions: those behind are waited for.
        return assign(wanted, in_order([*found.sources, *receivers]))
    except PlanError:
        return assign(wanted, in_order([*found.sources, *found.others]))


def _newest_run(senders: list[Member]) -> list[Member]:
    """Of several runs of a trainer, the one whose member came last."""
    return [member for member in senders if member.run_id == senders[-1].run_id]


def _missing(chosen: Sequence[Member]) -> dict[str, TransferError]:
    """Sender ranks that have not come yet, or are gone."""
    ranks = {member.rank for member in chosen if member.role == "sender"}
    if not ranks:
        return {}
    expected = range(next(m.num_ranks for m in chosen if m.role == "sender"))
    return {
        f"rank {rank}": PeerLostError(f"sender rank {rank} is not in the directory")
        for rank in expected
        if rank not in ranks
    }
