"""How long after its publication each rollout replica samples with a weight version."""

from cosmos_core.messages import Event, ReplicaJoined, VersionLoaded, VersionPublished

_MOST_VERSIONS = 64  # a replica this far behind is no longer waited for


class ServedTimes:
    """Follows the events of a run, by the clock of its controller."""

    def __init__(self) -> None:
        """Nothing is published yet."""
        self._published: dict[tuple[int, int], float] = {}  # by lineage and version
        self._joined: dict[str, float] = {}

    def note(self, event: Event, now: float) -> float | None:
        """Take an event in; return the seconds if by it a replica serves a version.

        They count from when the first policy replica had its snapshot, or from when the rollout
        replica joined if that was later.

        Args:
            event: of the controller, in their order.
            now: when it was taken in, in seconds.
        """
        match event:
            case VersionPublished():
                self._published.setdefault((event.lineage, event.version), now)
                if len(self._published) > _MOST_VERSIONS:
                    del self._published[next(iter(self._published))]
            case ReplicaJoined():
                self._joined[event.replica] = now
            case VersionLoaded():
                published = self._published.get((event.lineage, event.version))
                if published is not None:
                    return now - max(published, self._joined.get(event.replica, published))
            case _:
                pass
        return None
