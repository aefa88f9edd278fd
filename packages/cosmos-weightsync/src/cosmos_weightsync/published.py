"""A sender rank's snapshots as a holder: published versions that readers can pin."""

from collections.abc import Callable, Sequence

from cosmos_weightsync.chunks import HeldBoxes
from cosmos_weightsync.deadlines import Deadline
from cosmos_weightsync.holding import Region, VersionRange
from cosmos_weightsync.layout import Layout
from cosmos_weightsync.snapshots import Snapshot, SnapshotStore

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

    def pin(
        self, wanted: VersionRange, deadline: Deadline, hang_up: Callable[[], None]
    ) -> "_PinnedSnapshot":
        """Hold a version; it stays until it is released, so nobody is ever hung up on."""
        snapshot = self._store.pin(wanted.at_least, wanted.prefer, deadline, at_most=wanted.at_most)
        return _PinnedSnapshot(self._store, snapshot, self._run_id)


class _PinnedSnapshot:
    """A `cosmos_weightsync.holding.PinnedVersion`."""

    def __init__(self, store: SnapshotStore, snapshot: Snapshot, run_id: str) -> None:
        self._store = store
        self._snapshot: Snapshot | None = snapshot
        self._version = snapshot.version
        self._held = snapshot.held
        self._run_id = run_id

    @property
    def version(self) -> int:
        return self._version

    @property
    def run_id(self) -> str:
        return self._run_id

    @property
    def is_whole(self) -> bool:
        return True

    def boxes(self, deadline: Deadline) -> HeldBoxes:
        return self._held

    def settle(self, regions: Sequence[Region], deadline: Deadline) -> None:
        """It is whole from the start."""

    def release(self) -> None:
        snapshot, self._snapshot = self._snapshot, None
        if snapshot is not None:
            self._store.unpin(snapshot)
