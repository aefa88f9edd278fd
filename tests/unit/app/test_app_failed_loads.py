"""A rollout that can load no weights is told of, and begins anew."""

import pytest

from cosmos_app.errors import RunError
from cosmos_app.failing import failing_replicas
from cosmos_app.roles.failed_loads import FailedLoads
from cosmos_core.messages import LoadFailed, VersionLoaded

FAILED = LoadFailed(replica="rollout-0", version=2, reason="no such device", lineage=0)
LOADED = VersionLoaded(replica="rollout-0", version=2, transfer_s=0.1, stall_s=0.0, lineage=0)


class Clock:
    """Time that is set."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_replica_ends_when_many_loads_in_a_row_have_failed_for_long() -> None:
    clock = Clock()
    loads = FailedLoads(clock)
    for clock.now in range(119):
        loads.note(FAILED)
    clock.now = 120.0
    with pytest.raises(RunError, match=r"120 loads .* failed for 120 s, .*: no such device; "):
        loads.note(FAILED)


def test_a_few_that_fail_slowly_or_before_one_that_does_not_are_no_reason() -> None:
    clock = Clock()
    loads = FailedLoads(clock)
    for clock.now in range(0, 190, 10):
        loads.note(FAILED)
    loads.note(LOADED)
    for clock.now in range(190, 300):
        loads.note(FAILED)


def test_who_started_the_run_is_told_which_replica_loads_nothing() -> None:
    replica = {"failures": 0, "last_failure": "", "failed_loads": 3, "load_failure": "no device"}
    status = {"replicas": {"rollout-0": replica, "rollout-1": {**replica, "failed_loads": 2}}}
    assert failing_replicas(status) == {
        "rollout-0": "cannot load new weights, and tries again: no device"
    }
