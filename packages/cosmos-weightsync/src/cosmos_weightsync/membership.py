"""Who takes part, what they have, and whether a group may commit: state and rules, no sockets.

Time is passed in. A member that is not renewed within its lease is forgotten, and so is a sender
when another one registers for its rank. The epoch counts comings and goings, the revision every
change.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from cosmos_weightsync.ballots import Ballot, Content, Decision, Quorum, Standing, Vote
from cosmos_weightsync.errors import (
    ConfigurationError,
    ProtocolError,
    TopologyError,
    VersionError,
)
from cosmos_weightsync.holding import Role
from cosmos_weightsync.links import Links

__all__ = ["Member", "MembershipTable", "View"]

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
        content: What that version is; not known of a sender.
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
    content: Content | None = None

    @property
    def title(self) -> str:
        """Name and place, for errors."""
        where = f"at {self.endpoint}" if self.endpoint else f"on {self.host}"
        return f"{self.name or self.role} {where}"

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        told = {item.name: getattr(self, item.name) for item in fields(self)}
        return {**told, "content": None if self.content is None else self.content.to_json()}

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
            content = Content.from_json(data.get("content"))
            member = cls(id=str(data["id"]), role=role, content=content)
            return replace(member, **text, **numbers)
        except (KeyError, TypeError, ValueError) as error:
            raise ProtocolError(f"not a member: {error!r}") from error


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


class MembershipTable:
    """The state of a directory. Not locked: whoever owns it does that."""

    def __init__(self, lease_s: float, links: Links | None = None) -> None:
        self._lease_s = lease_s
        self._links = links or Links()
        self._members: dict[str, Member] = {}
        self._seen: dict[str, float] = {}
        self._layouts: dict[str, Any] = {}
        self._ballots: dict[tuple[str, str, int], Ballot] = {}
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
            for ballot in self._ballots.values():
                ballot.forget(member_id)
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
        has = replace(member, version=version, run_id=run_id, content=None)
        self._members[member_id] = has
        self._revision += 1

    def vote(
        self,
        member_id: str,
        version: int,
        vote: Vote,
        quorum: Quorum,
        run_id: str = "",
        *,
        content: Content | None = None,
    ) -> Decision:
        """A receiver says how it is with a version; returns what its group does.

        Who is ready with other bytes than somebody before it, in the same pieces, has failed.

        Args:
            member_id: Who.
            version: Which.
            vote: How it is.
            quorum: Of the group.
            run_id: Of the trainer that made it, as another run may count anew; if empty, that of
                the senders who are here.
            content: What is ready.

        Raises:
            ConfigurationError: others of its group want another quorum.
            VersionError: the member is not known.
        """
        member = self._known(member_id)
        group, run_id = member.group, run_id or self._newest_run()
        ballot = self._ballots.setdefault((group, run_id, version), Ballot(quorum))
        if ballot.quorum != quorum:
            raise ConfigurationError(
                f"group {group!r}, version {version}: one wants {quorum}, others {ballot.quorum}"
            )
        ballot.cast(member_id, member.title, vote, content if vote == "ready" else None)
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
        unlike = ballot.unlike.get(member_id, "")
        return Standing(ballot.decision, tuple(sorted(missing)), tuple(failed), unlike)

    def _receivers(self, group: str) -> list[Member]:
        return [m for m in self._members.values() if m.role == "receiver" and m.group == group]

    @staticmethod
    def _ready(ballot: Ballot, version: int, run_id: str, receivers: Iterable[Member]) -> set[str]:
        """Who said so, and who has the version, as far as they did not say something else.

        Whose bytes are not those of another counts once it has said so, which is too late for one.
        """
        done = [m for m in receivers if m.version >= version and m.run_id == run_id]
        odd = ballot.odd({m.id: m.content for m in done if m.version == version and m.content})
        return ballot.ready | ({m.id for m in done} - ballot.failed - ballot.withdrawn - odd)

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
