"""Who might have versions, as whoever fetches one asks for it."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from cosmos_weightsync.deadlines import Deadline
from cosmos_weightsync.errors import TransferError
from cosmos_weightsync.layout import Layout, ShardSpec
from cosmos_weightsync.receiver_session import ReceiverSession
from cosmos_weightsync.staging import Source

__all__ = ["Found", "Roster"]


@dataclass(frozen=True, slots=True)
class Found:
    """Who can be reached.

    Attributes:
        sources: Whoever may have versions.
        sessions: With some or all of them, by endpoint.
        unreachable: Who should have been there, by endpoint.
        others: Who may have what the sources do not: receivers of other versions that will do, and
            senders.
    """

    sources: Sequence[Source]
    sessions: dict[str, ReceiverSession]
    unreachable: dict[str, TransferError]
    others: Sequence[Source] = ()


class Roster(Protocol):
    """Who might have versions."""

    def find(self, at_least: int, deadline: Deadline) -> Found:
        """Look now for those who have a version, or will.

        Args:
            at_least: The oldest version that will do.
            deadline: When to give up.

        Raises:
            WeightSyncError: those who can be reached do not fit together.
        """
        ...

    def assign(self, wanted: Sequence[ShardSpec], found: Found) -> list[tuple[Source, Layout]]:
        """Plan who of those found is to give what.

        Raises:
            PlanError: together they do not have all of it.
        """
        ...

    def instead(
        self, wanted: Sequence[ShardSpec], failed: Collection[str], version: int
    ) -> list[tuple[Source, Layout]]:
        """Plan, at once, what is left of a transfer over others than those that failed.

        Raises:
            PlanError: they do not have all of it.
        """
        ...

    @property
    def chunk_bytes(self) -> int | None:
        """What may travel at a time by the plan made last; ``None`` if nobody passes on."""
        ...

    def is_stale(self) -> bool:
        """Whether a plan made before is no longer the best, though it would still work."""
        ...

    def suspect(self, endpoint: str, error: TransferError) -> None:
        """This one was found dead or silent."""
        ...
