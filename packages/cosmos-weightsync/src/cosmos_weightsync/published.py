"""A sender rank's snapshots as a holder: published versions that readers can pin."""

from collections.abc import Sequence

from cosmos_weightsync.chunks import HeldBoxes
from cosmos_weightsync.deadlines import Deadline
from cosmos_weightsync.holding import Reader, Region, VersionRange
from cosmos_weightsync.layout import Layout
from cosmos_weightsync.snapshots import Pin, SnapshotStore

__all__ = ["PublishedVersions"]


class PublishedVersions:
    """A `cosmos_weightsync.holding.Holder` over a `SnapshotStore`.

    Args:
        store: The snapshots.
        layout: What this rank offers.
        run_id: Of the trainer.
    """

    def __init__(self, store: SnapshotStore, layout: Layout, run_id: str) -> None:
        self._store = store
        self._layout = layout
        self._run_id = run_id

    def layout(self, deadline: Deadline) -> Layout:
        """What this rank offers; known from the start."""
        return self._layout

    def pin(self, wanted: VersionRange, deadline: Deadline, reader: Reader) -> "_PinnedSnapshot":
        """Hold a version: it stays until it is released, and the reader may be too late for that.

        Who reads for too long is hung up on; see `SnapshotStore`.
        """
        pin = self._store.pin(wanted, deadline, reader)
        return _PinnedSnapshot(self._store, pin, self._run_id)


class _PinnedSnapshot:
    """A `cosmos_weightsync.holding.PinnedVersion`."""

    def __init__(self, store: SnapshotStore, pin: Pin, run_id: str) -> None:
        self._store = store
        self._pin: Pin | None = pin
        self._version = pin.version
        self._held = pin.snapshot.held
        self._reader = pin.reader
        self._run_id = run_id

    @property
    def version(self) -> int:
        return self._version

    @property
    def run_id(self) -> str:
        return self._run_id

    @property
    def reader(self) -> Reader:
        return self._reader

    @property
    def is_whole(self) -> bool:
        return True

    def boxes(self, deadline: Deadline) -> HeldBoxes:
        return self._held

    def settle(self, regions: Sequence[Region], deadline: Deadline) -> None:
        """It is whole from the start."""

    def release(self) -> None:
        pin, self._pin = self._pin, None
        if pin is not None:
            self._store.unpin(pin)
