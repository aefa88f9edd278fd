"""Who takes part, what they have, and whether a group may commit: state and rules, no sockets.

Time is passed in. A member that is not renewed within its lease is forgotten, and so is a sender
when another one registers for its rank. The epoch counts comings and goings, the revision every
change.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

from cosmos_weightsync.errors import (
    ConfigurationError,
    ProtocolError,
    TopologyError,
    VersionError,
)
from cosmos_weightsync.holding import Role
from cosmos_weightsync.links import Links
from cosmos_weightsync.settings import check_choice

__all__ = ["Decision", "Member", "MembershipTable", "Quorum", "Standing", "View", "Vote"]

Vote = Literal["ready", "failed", "withdrawn"]
Decision = Literal["commit", "abort", "open"]
Agreement = Literal["all", "at_least", "each"]


_TEXT = ("name", "group", "endpoint", "host", "run_id", "layout")
_NUMBERS = ("rank", "num_ranks", "version")


@dataclass(frozen=True, kw_only=True, slots=True)
class Member:
    """One sender or receiver rank.

    Attributes:
        id: Its own choice; another process has another one.
        role: What it is.
        rank: Its number on its side.
        num_ranks: How many its side has.
        name: For people.
        group: Receivers of one group commit together.
        endpoint: Where it can be read from; empty for a receiver that serves nobody.
        host: The host it runs on, for whoever plans with the topology.
        run_id: Of the trainer whose version it has.
        version: The newest whole version it has, -1 for none.
        layout: The digest of what it holds; empty as long as it does not know.
    """

    id: str
    role: Role
    rank: int = 0
    num_ranks: int = 1
    name: str = ""
    group: str = ""
    endpoint: str = ""
    host: str = ""
    run_id: str = ""
    version: int = -1
    layout: str = ""

    @property
    def title(self) -> str:
        """Name and place, for errors."""
        where = f"at {self.endpoint}" if self.endpoint else f"on {self.host}"
        return f"{self.name or self.role} {where}"

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {item.name: getattr(self, item.name) for item in fields(self)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Member":
        """The inverse of `to_json`.

        Raises:
            ProtocolError: the value is no member.
        """
        try:
            text = {key: str(data[key]) for key in _TEXT}
            numbers = {key: int(data[key]) for key in _NUMBERS}
            role: Role = "receiver" if data["role"] == "receiver" else "sender"
            return replace(cls(id=str(data["id"]), role=role), **text, **numbers)
        except (KeyError, TypeError, ValueError) as error:
            raise ProtocolError(f"not a member: {error!r}") from error


@dataclass(frozen=True, slots=True)
class Quorum:
    """When a group of receivers commits a version.

    Attributes:
        kind: ``all`` that are registered; ``at_least`` so many; ``each`` for itself.
        count: For ``at_least``.
    """

    kind: Agreement = "all"
    count: int = 0

    def __post_init__(self) -> None:
        check_choice("kind", self.kind, Agreement)
        if (self.kind == "at_least") != (self.count > 0):
            raise ConfigurationError("a count above 0 goes with 'at_least' and with nothing else")

    def decide(self, live: Iterable[str], ready: set[str], failed: set[str]) -> Decision:
        """Commit, abort, or wait on.

        A quorum of ``all`` is broken by one failure, one of ``at_least`` by so many that too few
        are left. The dead do not count.
        """
        here = set(live)
        left = here - failed
        if self.kind == "each":
            return "commit"
        needed = len(here) if self.kind == "all" else self.count
        if len(ready & here) >= needed:
            return "commit"
        return "abort" if failed & here and len(left) < needed else "open"


@dataclass(frozen=True, slots=True)
class Standing:
    """How a group is with a version.

    Attributes:
        decision: What it does.
        missing: Who is not ready and did not fail either, by `Member.title`.
        failed: Who said that it will not have the version.
    """

    decision: Decision
    missing: tuple[str, ...] = ()
    failed: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "decision": self.decision,
            "missing": [*self.missing],
            "failed": [*self.failed],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Standing":
        """The inverse of `to_json`; a directory of an earlier release tells the decision alone."""
        said = data["decision"]
        names = [tuple(str(who) for who in data.get(key, ())) for key in ("missing", "failed")]
        return cls(said if said in {"commit", "abort"} else "open", *names)


@dataclass(frozen=True, slots=True)
class View:
    """What everybody is told.

    Attributes:
        epoch: Counts comings and goings.
        revision: Counts all changes.
        members: Everybody who is here.
        links: How fast the links between them are, for plans that all must make alike.
    """

    epoch: int
    revision: int
    members: tuple[Member, ...]
    links: Links = field(default_factory=Links)

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        members = [member.to_json() for member in self.members]
        numbers = {"epoch": self.epoch, "revision": self.revision}
        return {**numbers, "members": members, "links": self.links.to_json()}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "View":
        """The inverse of `to_json`.

        Raises:
            ProtocolError: the value is no view.
        """
        try:
            members = tuple(Member.from_json(item) for item in data["members"])
            links = Links.from_json(data["links"])
            return cls(int(data["epoch"]), int(data["revision"]), members, links)
        except (KeyError, TypeError, ValueError, TopologyError) as error:
            raise ProtocolError(f"not a view: {error!r}") from error


@dataclass(slots=True)
class _Ballot:
    quorum: Quorum
    ready: set[str] = field(default_factory=set[str])
    failed: set[str] = field(default_factory=set[str])
    withdrawn: set[str] = field(default_factory=set[str])
    titles: dict[str, str] = field(default_factory=dict[str, str])
    decision: Decision = "open"


class MembershipTable:
    """The state of a directory. Not locked: whoever owns it does that."""

    def __init__(self, lease_s: float, links: Links | None = None) -> None:
        self._lease_s = lease_s
        self._links = links or Links()
        self._members: dict[str, Member] = {}
        self._seen: dict[str, float] = {}
        self._layouts: dict[str, Any] = {}
        self._ballots: dict[tuple[str, str, int], _Ballot] = {}
        self._epoch = 0
        self._revision = 0

    def view(self) -> View:
        """Everybody who is here."""
        members = tuple(self._members.values())
        return View(self._epoch, self._revision, members, self._links)

    def layout(self, digest: str) -> Any:
        """A layout that a member came with; a JSON value.

        Raises:
            VersionError: nobody has it any more.
        """
        if digest not in self._layouts:
            raise VersionError(f"no member has a layout of digest {digest}")
        return self._layouts[digest]

    def join(self, member: Member, layout: Any, now: float) -> None:
        """A member comes, comes back, or has more to say about itself."""
        for other in list(self._members.values()):
            is_sender = member.role == other.role == "sender"
            if other.id != member.id and is_sender and member.rank == other.rank:
                self.leave(other.id)
        if member.layout:
            self._layouts[member.layout] = layout
        self._epoch += member.id not in self._members
        if self._members.get(member.id) != member:
            self._members[member.id] = member
            self._revision += 1
        self._seen[member.id] = now
        self._decide()

    def renew(self, member_id: str, now: float) -> bool:
        """A member is alive; ``False`` if it is not known (any more) and must join again."""
        if member_id in self._members:
            self._seen[member_id] = now
        return member_id in self._members

    def leave(self, member_id: str) -> None:
        """A member goes. May be repeated."""
        if self._members.pop(member_id, None) is not None:
            self._epoch += 1
            self._revision += 1
            used = {member.layout for member in self._members.values()}
            self._layouts = {key: value for key, value in self._layouts.items() if key in used}
            self._decide()

    def expire(self, now: float) -> None:
        """Forget those whose lease is over."""
        for member_id in list(self._members):
            if now - self._seen[member_id] > self._lease_s:
                self.leave(member_id)

    def hold(self, member_id: str, version: int, run_id: str) -> None:
        """A member has a whole version now; -1 for none."""
        member = self._known(member_id)
        self._members[member_id] = replace(member, version=version, run_id=run_id)
        self._revision += 1

    def vote(
        self, member_id: str, version: int, vote: Vote, quorum: Quorum, run_id: str = ""
    ) -> Decision:
        """A receiver says how it is with a version; returns what its group does.

        Args:
            member_id: Who.
            version: Which.
            vote: How it is.
            quorum: Of the group.
            run_id: Of the trainer that made it, as another run may count anew; if empty, that of
                the senders who are here.

        Raises:
            ConfigurationError: others of its group want another quorum.
            VersionError: the member is not known.
        """
        member = self._known(member_id)
        group, run_id = member.group, run_id or self._newest_run()
        ballot = self._ballots.setdefault((group, run_id, version), _Ballot(quorum))
        if ballot.quorum != quorum:
            raise ConfigurationError(
                f"group {group!r}, version {version}: one wants {quorum}, others {ballot.quorum}"
            )
        said = {"ready": ballot.ready, "failed": ballot.failed, "withdrawn": ballot.withdrawn}
        for who in said.values():
            who.discard(member_id)
        said[vote].add(member_id)
        ballot.titles[member_id] = member.title
        self._decide()
        same = [key for key in self._ballots if key[:2] == (group, run_id)]
        for old in [key for key in same if key[2] < version - 100]:
            del self._ballots[old]
        return ballot.decision

    def decision(self, member_id: str, version: int, run_id: str = "") -> Decision:
        """What the group of a member does with a version; arguments as in `vote`."""
        member = self._members.get(member_id)
        if member is None:
            return "open"
        ballot = self._ballots.get((member.group, run_id or self._newest_run(), version))
        return "open" if ballot is None else ballot.decision

    def standing(self, member_id: str, version: int, run_id: str = "") -> Standing:
        """The `decision`, and whom it waits for or fails by; the asker is not among the former."""
        member, run_id = self._members.get(member_id), run_id or self._newest_run()
        ballot = self._ballots.get((member.group if member else "", run_id, version))
        if member is None or ballot is None:
            return Standing("open")
        receivers = self._receivers(member.group)
        known = self._ready(ballot, version, run_id, receivers) | ballot.failed | {member_id}
        missing = [
            one.title + (", which gave up waiting" if one.id in ballot.withdrawn else "")
            for one in receivers
            if one.id not in known
        ]
        failed = sorted(ballot.titles[who] for who in ballot.failed)
        return Standing(ballot.decision, tuple(sorted(missing)), tuple(failed))

    def _receivers(self, group: str) -> list[Member]:
        return [m for m in self._members.values() if m.role == "receiver" and m.group == group]

    @staticmethod
    def _ready(ballot: _Ballot, version: int, run_id: str, receivers: Iterable[Member]) -> set[str]:
        """Who said so, and who has the version, as far as they did not say something else."""
        done = {m.id for m in receivers if m.version >= version and m.run_id == run_id}
        return ballot.ready | (done - ballot.failed - ballot.withdrawn)

    def _newest_run(self) -> str:
        runs = [member.run_id for member in self._members.values() if member.role == "sender"]
        return runs[-1] if runs else ""

    def _known(self, member_id: str) -> Member:
        if member_id not in self._members:
            raise VersionError(f"member {member_id} is not known here (any more)")
        return self._members[member_id]

    def _decide(self) -> None:
        """Look at every open ballot again. What is decided stays decided."""
        for (group, run_id, version), ballot in self._ballots.items():
            if ballot.decision == "open":
                receivers = self._receivers(group)
                ready = self._ready(ballot, version, run_id, receivers)
                live = [m.id for m in receivers]
                ballot.decision = ballot.quorum.decide(live, ready, ballot.failed)
                self._revision += ballot.decision != "open"
