"""What everybody who can give a version away offers, be it a sender or a receiver that has it.

A holder pins one version for one reader. While it is pinned its bytes stay as they are; a holder
that must overwrite it all the same hangs up on the reader first, so that no reader is ever told
that bytes are good which were not.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from cosmos_weightsync.boxes import Box
from cosmos_weightsync.chunks import HeldBoxes
from cosmos_weightsync.deadlines import Deadline
from cosmos_weightsync.layout import Layout

__all__ = ["Holder", "PinnedVersion", "Reader", "Region", "Role", "VersionRange"]

Role = Literal["sender", "receiver"]
Region = tuple[str, Box]
"""The name of a tensor and a box of it."""


@dataclass(frozen=True, eq=False, slots=True)
class Reader:
    """Who reads a version.

    Attributes:
        name: For errors, and for whoever waits for it.
        hang_up: Ends the conversation with it at once; from any thread. Its version is released
            soon after, by the thread that converses.
    """

    name: str
    hang_up: Callable[[], None]


@dataclass(frozen=True, slots=True)
class VersionRange:
    """Which versions will do.

    Attributes:
        at_least: The oldest.
        at_most: The newest; ``None`` is any.
        prefer: Which of several.
        is_spare: Whether the reader does without if the holder needs the memory for newer ones.
    """

    at_least: int
    at_most: int | None = None
    prefer: Literal["newest", "oldest"] = "newest"
    is_spare: bool = False

    @classmethod
    def exactly(cls, version: int, *, is_spare: bool = False) -> "VersionRange":
        """This one and no other."""
        return cls(version, version, is_spare=is_spare)

    def __contains__(self, version: int) -> bool:
        return max(self.at_least, 0) <= version and (
            self.at_most is None or version <= self.at_most
        )


class PinnedVersion(Protocol):
    """One version held for one reader. Used by one thread."""

    @property
    def version(self) -> int:
        """Which."""
        ...

    @property
    def run_id(self) -> str:
        """Of the trainer that made it."""
        ...

    @property
    def reader(self) -> Reader:
        """For whom."""
        ...

    @property
    def is_whole(self) -> bool:
        """Whether all of it is there already and verified."""
        ...

    def boxes(self, deadline: Deadline) -> HeldBoxes:
        """Its memory. Looking at a region that has not arrived yet waits for it.

        Looking raises `VersionGoneError` once the version is overwritten or given up, and
        `DeadlineError`.
        """
        ...

    def settle(self, regions: Sequence[Region], deadline: Deadline) -> None:
        """Wait until these regions are there and verified.

        Raises:
            VersionGoneError: it was overwritten or given up.
            DeadlineError: it took too long.
        """
        ...

    def release(self) -> None:
        """Give it back. May be repeated."""
        ...


class Holder(Protocol):
    """Whoever has versions to give away. Called from many threads."""

    def layout(self, deadline: Deadline) -> Layout:
        """What it holds of every version, as a side of one rank, in the dtype that travels.

        Raises:
            DeadlineError: it did not learn what it is to hold in time.
        """
        ...

    def pin(self, wanted: VersionRange, deadline: Deadline, reader: Reader) -> PinnedVersion:
        """Hold a version for a reader; waits for one that will do.

        Args:
            wanted: Which will do.
            deadline: When to give up.
            reader: Who is to have it.

        Raises:
            VersionGoneError: it has only newer ones, or none to spare.
            DeadlineError: it got none in time.
            PeerLostError: the holder is closing.
        """
        ...
