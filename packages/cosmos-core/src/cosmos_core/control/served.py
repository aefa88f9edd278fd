"""What publications cost: how long each policy stood still, and when each rollout served them."""

from cosmos_core.messages import (
    Event,
    PublicationSkipped,
    ReplicaJoined,
    VersionLoaded,
    VersionPublished,
)

_MOST_VERSIONS = 64  # a replica this far behind is no longer waited for


class ServedTimes:
    """Follows the events of a run, by the clock of its controller."""

    def __init__(self) -> None:
        """Nothing is published yet."""
        self._published: dict[tuple[int, int], float] = {}  # by lineage and version
        self._joined: dict[str, tuple[str, float]] = {}  # by replica: its incarnation, and when
        self._served: dict[str, tuple[int, int]] = {}  # by replica: its last lineage and version
        self._last: dict[str, dict[str, float]] = {}  # by replica: its last figure

    def note(self, event: Event, now: float) -> float | None:
        """Take an event in; return the seconds if by it a replica serves a version.

        They count from when the first policy replica had its snapshot, or from when the rollout
        replica joined if that was later.

        Args:
            event: of the controller, in their order.
            now: when it was taken in, in seconds.
        """
        match event:
            case PublicationSkipped():
                self._last[event.replica] = {"publish_ms": 1e3 * event.stall_s}
            case VersionPublished():
                if event.stall_s > 0.0:
                    self._last[event.replica] = {"publish_ms": 1e3 * event.stall_s}
                self._published.setdefault((event.lineage, event.version), now)
                if len(self._published) > _MOST_VERSIONS:
                    del self._published[next(iter(self._published))]
            case ReplicaJoined():
                known, _ = self._joined.get(event.replica, (None, now))
                if event.incarnation != known:  # it may be told twice
                    self._served.pop(event.replica, None)
                    self._joined[event.replica] = event.incarnation, now
            case VersionLoaded():
                return self._served_after(event, now)
            case _:
                pass
        return None

    def last(self, replica: str) -> dict[str, float]:
        """Return what a replica's last publication or load was like, by name.

        ``publish_ms`` is for how long a policy stood still, its rank that did so longest, be it to
        find that there was no room to publish; ``served_s`` the seconds until a
        rollout sampled with a version; nothing of a replica without either.
        """
        return dict(self._last.get(replica, {}))

    def _served_after(self, event: VersionLoaded, now: float) -> float | None:
        which = event.lineage, event.version
        published = self._published.get(which)
        if published is None or self._served.get(event.replica) == which:  # it may be told twice
            return None
        self._served[event.replica] = which
        _, joined = self._joined.get(event.replica, ("", published))
        served_s = now - max(published, joined)
        self._last[event.replica] = {"served_s": served_s}
        return served_s
