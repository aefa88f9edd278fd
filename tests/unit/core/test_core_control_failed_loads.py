"""Rollouts that cannot load weights: they try again, and the run says whom it waits for."""

from cosmos_core.control import Controller, ControllerConfig
from cosmos_core.messages import (
    LoadFailed,
    LoadVersion,
    ReplicaJoined,
    Tick,
    VersionLoaded,
    VersionPublished,
)


def test_loads_that_fail_are_tried_again_counted_and_named():
    controller = Controller(ControllerConfig(num_steps=4, groups_per_step=1, samples_per_group=2))
    rollout = ReplicaJoined(replica="rollout-0", role="rollout", slots=1, version=-1)
    controller.handle(rollout, 0.0)
    policy = ReplicaJoined(replica="policy-0", role="policy", version=0, endpoints=("p",))
    controller.handle(policy, 0.0)
    published = VersionPublished(replica="policy-0", version=0, lineage=0)
    asked = [order for _, order in controller.handle(published, 0.0)]
    for second in range(1, 5):
        assert LoadVersion in map(type, asked)
        failed = LoadFailed(replica="rollout-0", version=0, reason="no such device", lineage=0)
        controller.handle(failed, second - 0.5)
        asked = [order for _, order in controller.handle(Tick(), second + 0.6)]
    replica = controller.status(5.0)["replicas"]["rollout-0"]
    assert (replica["failed_loads"], replica["load_failure"]) == (4, "no such device")
    assert controller.waiting_for(5.0) == (
        "version 0 to load on rollout-0; rollout-0 could not, 4 times: no such device"
    )
    loaded = VersionLoaded(replica="rollout-0", version=0, transfer_s=0.0, stall_s=0.0, lineage=0)
    controller.handle(loaded, 6.0)
    replica = controller.status(6.0)["replicas"]["rollout-0"]
    assert (replica["failed_loads"], replica["load_failure"]) == (0, "")
