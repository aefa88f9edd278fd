"""What somebody who drives the controller by hand is told: no mistake waits in silence."""

from collections.abc import Mapping

import msgspec
import pytest

from cosmos_core.control import Controller, ControllerConfig, StalenessConfig
from cosmos_core.messages import ReplicaJoined, VersionPublished, decode_event


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"role": "rollouts", "slots": 4}, "replica r: role is 'rollouts'; want one of"),
        ({"role": "rollout"}, "rollout replica r: slots is 0; want 1 or more"),
    ],
)
def test_a_replica_that_could_never_work_is_refused(fields: Mapping[str, str], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ReplicaJoined(replica="r", **fields)  # pyright: ignore[reportArgumentType]
    sent = msgspec.msgpack.encode({"type": "ReplicaJoined", "replica": "r", **fields})
    with pytest.raises(msgspec.ValidationError):
        decode_event(sent)


def test_weights_that_nobody_serves_are_what_is_waited_for() -> None:
    staleness = StalenessConfig(depth=0, bound=0)
    config = ControllerConfig(
        num_steps=9, groups_per_step=1, samples_per_group=2, staleness=staleness
    )
    controller = Controller(config)
    controller.handle(ReplicaJoined(replica="p", role="policy", version=1), 0.0)
    controller.handle(VersionPublished(replica="p", version=1), 0.0)
    controller.handle(ReplicaJoined(replica="r", role="rollout", slots=1, version=-1), 0.0)
    assert controller.waiting_for(1.0) == (
        "endpoints of version 1: the policy replicas that have it joined with none"
    )


def test_a_run_that_would_drop_every_group_is_refused() -> None:
    with pytest.raises(ValueError, match="every group would be dropped; want 2 samples or more"):
        ControllerConfig(num_steps=1, groups_per_step=1, samples_per_group=1, drop_zero_signal=True)
