"""How a group of receivers comes to put a version to use: votes, and what they make.

Receivers of the same pieces must have the same bytes. They were compared with what their holders
told, and may have had different holders: two ranks of a trainer that should have equal weights and
have not are found here, where the second of their readers is ready.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from cosmos_weightsync.errors import ConfigurationError
from cosmos_weightsync.settings import check_choice

__all__ = ["Ballot", "Content", "Decision", "Quorum", "Standing", "Vote"]

Vote = Literal["ready", "failed", "withdrawn"]
Decision = Literal["commit", "abort", "open"]
Agreement = Literal["all", "at_least", "each"]


@dataclass(frozen=True, slots=True)
class Content:
    """What a receiver has of a version.

    Attributes:
        pieces: The digest of the pieces it came in: names, boxes and dtypes.
        digest: The digest of their bytes; comparable where the pieces are the same.
    """

    pieces: str
    digest: str

    def is_unlike(self, other: "Content") -> bool:
        """Whether the same pieces have other bytes there."""
        return self.pieces == other.pieces and self.digest != other.digest

    def to_json(self) -> dict[str, str]:
        """Plain values."""
        return {"pieces": self.pieces, "digest": self.digest}

    @classmethod
    def from_json(cls, data: Mapping[str, Any] | None) -> "Content | None":
        """The inverse of `to_json`; a receiver of an earlier release tells nothing."""
        return None if data is None else cls(str(data["pieces"]), str(data["digest"]))


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
        failed: Who will not have the version, as it said, or as it has other bytes.
        unlike: Who has other bytes in the same pieces than the asker, who may not commit.
    """

    decision: Decision
    missing: tuple[str, ...] = ()
    failed: tuple[str, ...] = ()
    unlike: str = ""

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "decision": self.decision,
            "missing": [*self.missing],
            "failed": [*self.failed],
            "unlike": self.unlike,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Standing":
        """The inverse of `to_json`; a directory of an earlier release tells the decision alone."""
        said = data["decision"]
        names = [tuple(str(who) for who in data.get(key, ())) for key in ("missing", "failed")]
        decision: Decision = said if said in {"commit", "abort"} else "open"
        missing, failed = names
        return cls(decision, missing, failed, str(data.get("unlike", "")))


@dataclass(slots=True)
class Ballot:
    """The votes of a group on one version.

    Attributes:
        quorum: When it commits.
        ready: Who is, by the ids of members, as below.
        failed: Who will not have it.
        withdrawn: Who was ready and gave up waiting.
        titles: What to call who voted.
        contents: What those have who are ready.
        unlike: Whose bytes differ, and from whose: a title.
        decision: What it came to; final once it is not open.
    """

    quorum: Quorum
    ready: set[str] = field(default_factory=set[str])
    failed: set[str] = field(default_factory=set[str])
    withdrawn: set[str] = field(default_factory=set[str])
    titles: dict[str, str] = field(default_factory=dict[str, str])
    contents: dict[str, Content] = field(default_factory=dict[str, Content])
    unlike: dict[str, str] = field(default_factory=dict[str, str])
    decision: Decision = "open"

    def cast(self, member_id: str, title: str, vote: Vote, content: Content | None) -> None:
        """Take the vote of a member, in place of what it said before."""
        said = {"ready": self.ready, "failed": self.failed, "withdrawn": self.withdrawn}
        for who in said.values():
            who.discard(member_id)
        self.titles[member_id] = title
        self.contents.pop(member_id, None)
        self.unlike.pop(member_id, None)
        other = self._other_than(content)
        if other:
            self.unlike[member_id] = self.titles[other]
        elif content is not None:
            self.contents[member_id] = content
        said["failed" if other else vote].add(member_id)

    def forget(self, member_id: str) -> None:
        """A member is gone; what it had counts on only where it was put to use."""
        if self.decision != "commit":
            self.contents.pop(member_id, None)

    def odd(self, held: Mapping[str, Content]) -> set[str]:
        """Whose bytes are not those of another, among those who have the version without a word."""
        all_there = {**held, **self.contents}
        silent = {who: content for who, content in held.items() if who not in self.contents}
        return {
            who
            for who, content in silent.items()
            if any(content.is_unlike(other) for other in all_there.values())
        }

    def _other_than(self, content: Content | None) -> str:
        """Who has the same pieces, and other bytes in them."""
        if content is None:
            return ""
        return next((who for who, other in self.contents.items() if content.is_unlike(other)), "")
