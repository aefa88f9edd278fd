"""Sending a reader only what it does not have: pieces it has already, or changes to a version.

A reader that still has a version offers it with the checksum of every piece. The holder leaves out
the pieces whose bytes are the same in the new version (frozen parameters, say), and sends of the
others, if it still has the offered version too, only the elements that changed.

```
reader                              holder
pull(base: version, run, checksums) ─►   compares piece by piece
                                    ◄─   moving(which pieces, how: "pieces" or "changes")
                                    ◄═   messages over the channel
                                    ◄─   sent(checksum of every piece)
```
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from cosmos_weightsync.chunks import HeldBoxes
from cosmos_weightsync.deadlines import Deadline
from cosmos_weightsync.edge_ends import EdgeEnd
from cosmos_weightsync.edges import pull_edge, serve_edge, source_checksums
from cosmos_weightsync.encodings.changed_edges import check_base, pull_changes, serve_changes
from cosmos_weightsync.errors import (
    BaseVersionError,
    ConfigurationError,
    DeadlineError,
    ProtocolError,
    VersionGoneError,
)
from cosmos_weightsync.holding import Holder, PinnedVersion, VersionRange

__all__ = ["Move", "Offer", "ReusePolicy", "Reused", "pull_move", "serve_offer"]

Reused = Literal["nothing", "pieces", "changes"]
How = Literal["pieces", "changes"]


@dataclass(frozen=True, slots=True)
class ReusePolicy:
    """What a receiver makes of the version it has.

    Attributes:
        reused: ``nothing``: every version is fetched whole. ``pieces``: not those whose bytes
            did not change. ``changes``: of the others only what changed, where the holder still
            has the version before.
        anchor_every: After so many versions in a row that built on another, one is fetched whole.
    """

    reused: Reused = "nothing"
    anchor_every: int = 64

    def __post_init__(self) -> None:
        if self.reused not in {"nothing", "pieces", "changes"} or self.anchor_every < 1:
            raise ConfigurationError(
                f"reuse must be nothing, pieces or changes, not {self.reused!r}; anchor_every "
                f"must be at least 1, not {self.anchor_every}"
            )


@dataclass(frozen=True, slots=True)
class Offer:
    """What a reader has of one holder's pieces.

    Attributes:
        version: Which.
        run_id: Of the trainer that made it.
        reused: What it wants made of it.
        checksums: Of every piece; empty until they are computed.
    """

    version: int
    run_id: str
    reused: Reused
    checksums: tuple[int, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """A JSON value."""
        return {
            "version": self.version,
            "run": self.run_id,
            "reused": self.reused,
            "checksums": list(self.checksums),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Offer":
        """The inverse of `to_json`."""
        reused = "changes" if data["reused"] == "changes" else "pieces"
        sums = tuple(int(value) for value in data["checksums"])
        return cls(int(data["version"]), str(data["run"]), reused, sums)


@dataclass(frozen=True, slots=True)
class Move:
    """What is about to cross an edge: these pieces (by number), in this way."""

    left: tuple[int, ...]
    how: How

    def to_json(self) -> dict[str, Any]:
        """A JSON value."""
        return {"left": list(self.left), "how": self.how}

    @classmethod
    def from_json(cls, data: Mapping[str, Any], num_pieces: int) -> "Move":
        """The inverse of `to_json`.

        Raises:
            ProtocolError: it is not about these pieces.
        """
        try:
            left = tuple(int(number) for number in data["left"])
            how: How = "changes" if data["how"] == "changes" else "pieces"
        except (KeyError, TypeError, ValueError) as error:
            raise ProtocolError("the holder sent a malformed 'moving'") from error
        if list(left) != sorted(set(left)) or not set(left) <= set(range(num_pieces)):
            raise ProtocolError(f"the holder wants to move pieces {left} of {num_pieces}")
        return cls(left, how)


def serve_offer(
    end: EdgeEnd,
    pinned: PinnedVersion,
    holder: Holder,
    offer: Offer,
    announce: Callable[[Move], None],
    deadline: Deadline,
) -> list[int]:
    """Send what the reader lacks of a whole version.

    Args:
        end: The holder's end.
        pinned: The version to send.
        holder: Who has it, and perhaps the offered one.
        offer: What the reader has.
        announce: Tells the reader what is coming.
        deadline: When to give up.

    Returns:
        The checksum of every piece, sent or not.

    Raises:
        BaseVersionError: the reader does not have what it says.
        TransferError: the reader is gone or too slow.
    """
    held = pinned.boxes(deadline)
    ours = source_checksums(end.pieces, held)
    if len(offer.checksums) != len(ours):
        raise BaseVersionError(
            f"version {offer.version}: {len(offer.checksums)} checksums for {len(ours)} pieces"
        )
    left = tuple(i for i, value in enumerate(ours) if offer.checksums[i] != value)
    pieces = [end.pieces[number] for number in left]
    base = _base_of(end, pinned, holder, offer, deadline) if left else None
    try:
        if base is None:
            announce(Move(left, "pieces"))
            if pieces:
                serve_edge(
                    end.channel, pieces, held, end.buckets, deadline, bucket_bytes=end.bucket_bytes
                )
            return ours
        before = base.boxes(deadline)
        theirs = [offer.checksums[number] for number in left]
        sums = source_checksums(pieces, before)
        check_base(pieces, sums, theirs, offer.version, "the holder")
        announce(Move(left, "changes"))
        serve_changes(replace(end, pieces=pieces), held, before, deadline)
        return ours
    finally:
        if base is not None:
            base.release()


def pull_move(
    end: EdgeEnd, held: HeldBoxes, move: Move, offer: Offer, deadline: Deadline
) -> tuple[list[int], int]:
    """Receive what `serve_offer` sends, over the offered version, which is in ``held``.

    Returns:
        The checksum of every piece, and how many bytes crossed the channel.

    Raises:
        TransferError: the holder is gone, too slow, or sent something else.
    """
    left = set(move.left)
    kept = [piece for number, piece in enumerate(end.pieces) if number not in left]
    regions = [(piece.name, piece.box) for piece in kept]
    held.arrived(regions, sum(piece.num_bytes for piece in kept))
    pieces = [end.pieces[number] for number in move.left]
    sums = list(offer.checksums)
    num_bytes = sum(piece.num_bytes for piece in pieces)
    arrived: list[int] = []
    if pieces and move.how == "changes":
        moved = pull_changes(replace(end, pieces=pieces), held, deadline)
        arrived, num_bytes = moved.checksums, moved.num_bytes
    elif pieces:
        arrived = pull_edge(
            end.channel, pieces, held, end.buckets, deadline, bucket_bytes=end.bucket_bytes
        )
    for number, value in zip(move.left, arrived, strict=True):
        sums[number] = value
    return sums, num_bytes


def _base_of(
    end: EdgeEnd, pinned: PinnedVersion, holder: Holder, offer: Offer, deadline: Deadline
) -> PinnedVersion | None:
    """The offered version, if changes since then can be told and are wanted."""
    if offer.reused != "changes" or end.channel.capabilities.one_sided:
        return None
    if offer.run_id != pinned.run_id or offer.version >= pinned.version:
        raise BaseVersionError(
            f"version {offer.version} of run {offer.run_id!r} cannot be the base of version "
            f"{pinned.version} of run {pinned.run_id!r}"
        )
    try:
        wanted = VersionRange.exactly(offer.version, is_spare=True)
        base = holder.pin(wanted, deadline.within(1.0), pinned.reader)
    except (VersionGoneError, DeadlineError):
        return None
    return base
