"""Seconds from a publication until each replica samples with it."""

from cosmos_core.control.served import ServedTimes
from cosmos_core.messages import ReplicaJoined, Tick, VersionLoaded, VersionPublished


def loaded(replica: str, version: int, lineage: int = 0) -> VersionLoaded:
    return VersionLoaded(
        replica=replica, version=version, transfer_s=0.1, stall_s=0.1, lineage=lineage
    )


def published(
    replica: str, version: int, lineage: int = 0, stall_s: float = 0.0
) -> VersionPublished:
    return VersionPublished(replica=replica, version=version, lineage=lineage, stall_s=stall_s)


def joined(replica: str, incarnation: str) -> ReplicaJoined:
    return ReplicaJoined(
        replica=replica, role="rollout", slots=4, version=-1, incarnation=incarnation
    )


def test_times_count_from_the_first_publication():
    times = ServedTimes()
    events = [
        (published("policy-0", 3), 10.0),
        (published("policy-1", 3), 11.0),
        (Tick(), 11.5),
        (loaded("rollout-0", 3), 12.0),
        (loaded("rollout-1", 3), 14.5),
    ]
    assert [times.note(event, now) for event, now in events] == [None, None, None, 2.0, 4.5]


def test_who_joined_later_is_not_held_against_a_version():
    times = ServedTimes()
    times.note(published("policy-0", 3), 10.0)
    times.note(joined("rollout-2", "first"), 100.0)
    assert times.note(loaded("rollout-2", 3), 101.5) == 1.5


def test_what_is_told_twice_counts_once_but_for_who_begins_again():
    times = ServedTimes()
    for _ in range(2):
        times.note(joined("rollout-0", "first"), 1.0)
        times.note(published("policy-0", 3), 10.0)
    assert times.note(loaded("rollout-0", 3), 12.0) == 2.0
    times.note(joined("rollout-0", "first"), 12.5)
    assert times.note(loaded("rollout-0", 3), 13.0) is None
    times.note(joined("rollout-0", "second"), 20.0)
    assert times.note(loaded("rollout-0", 3), 21.0) == 1.0


def test_what_was_not_seen_to_be_published_has_no_time():
    """Of another lineage, from before a snapshot, or too long ago."""
    times = ServedTimes()
    times.note(published("policy-0", 3, lineage=1), 10.0)
    assert times.note(loaded("rollout-0", 3), 12.0) is None
    assert times.note(loaded("rollout-0", 3, lineage=1), 12.0) == 2.0
    for version in range(4, 100):
        times.note(published("policy-0", version, lineage=1), 20.0)
    assert times.note(loaded("rollout-1", 3, lineage=1), 21.0) is None
    assert times.note(loaded("rollout-1", 99, lineage=1), 21.0) == 1.0


def test_of_each_replica_the_last_publication_or_load_is_known():
    times = ServedTimes()
    for version, stall_s in ((3, 0.5), (4, 0.25)):
        times.note(published("policy-0", version, stall_s=stall_s), 10.0 * version)
        times.note(loaded("rollout-0", version), 10.0 * version + version)
    times.note(published("policy-1", 4), 41.0)  # it does not say for how long it stood still
    found = {name: times.last(name) for name in ("policy-0", "policy-1", "rollout-0")}
    assert found == {
        "policy-0": {"publish_ms": 250.0},
        "policy-1": {},
        "rollout-0": {"served_s": 4.0},
    }
