"""Weights of a rollout replica that joins: from another that has them, the nearest first."""

from collections.abc import Sequence

import pytest

from cosmos_core.control import Controller, ControllerConfig
from cosmos_core.control.state import ControllerState
from cosmos_core.messages import (
    Command,
    LoadFailed,
    LoadVersion,
    Progress,
    ReplicaJoined,
    ReplicaLeft,
    Tick,
    VersionLoaded,
    VersionPublished,
)

HOSTS = {"near": "host-a", "far": "host-b", "silent": "host-a"}


class Run:
    """A controller whose policy serves version 3, and rollouts on two machines."""

    def __init__(self, *holders: str) -> None:
        config = ControllerConfig(num_steps=9, groups_per_step=1, samples_per_group=2)
        self.controller = Controller(config, ControllerState(step=3))
        self.now = 0.0
        self.tell(ReplicaJoined(replica="policy", role="policy", version=3, endpoints=("p",)))
        self.tell(VersionPublished(replica="policy", version=3))
        for name in holders:
            self.tell(self.joined(name, HOSTS[name]))
            self.load(name, () if name == "silent" else (f"{name}:1", f"{name}:2"))

    def tell(self, event: object) -> list[tuple[str, Command]]:
        self.now += 0.01
        return self.controller.handle(event, self.now)  # pyright: ignore[reportArgumentType]

    def load(self, name: str, endpoints: Sequence[str], version: int = 3) -> None:
        loaded = VersionLoaded(
            replica=name, version=version, transfer_s=0, stall_s=0, endpoints=tuple(endpoints)
        )
        self.tell(loaded)

    def joined(self, name: str, host: str) -> ReplicaJoined:
        return ReplicaJoined(replica=name, role="rollout", slots=1, version=-1, host=host)

    def order(self, event: object) -> LoadVersion:
        (order,) = [c for _, c in self.tell(event) if isinstance(c, LoadVersion)]
        return order

    @property
    def num_from_rollouts(self) -> int:
        return self.controller.state.counters.loads_from_rollouts


@pytest.mark.parametrize(
    ("holders", "host", "endpoints"),
    [
        (["far", "near"], "host-a", ("near:1", "near:2")),
        (["far", "near"], "host-b", ("far:1", "far:2")),
        (["far"], "host-a", ("far:1", "far:2")),
        (["silent"], "host-a", ("p",)),
        ([], "host-a", ("p",)),
    ],
)
def test_a_newcomer_is_sent_to_the_nearest_who_serves_the_version(holders, host, endpoints):
    run = Run(*holders)
    before = run.num_from_rollouts
    order = run.order(run.joined("new", host))
    assert (order.version, order.endpoints) == (3, endpoints)
    assert order.holder == endpoints[0].partition(":")[0].replace("p", "")
    run.load("new", ())
    assert run.num_from_rollouts == before + bool(order.holder)


def test_newcomers_are_spread_over_those_who_are_equally_near():
    run = Run("near", "far")
    asked = {run.order(run.joined(f"new-{i}", "host-c")).holder for i in range(4)}
    assert asked == {"near", "far"}


def test_after_a_load_that_failed_it_is_sent_to_the_policy():
    run = Run("near")
    assert run.order(run.joined("new", "host-a")).holder == "near"
    run.tell(LoadFailed(replica="new", version=3, reason="it left"))
    run.now += 5.0
    order = run.order(Tick())
    assert (order.holder, order.endpoints) == ("", ("p",))
    run.load("new", ())
    assert run.num_from_rollouts == 0


def test_a_newcomer_is_sent_to_its_own_machine_and_else_to_who_has_all_of_the_version():
    run = Run("near", "far")
    orders = [c for _, c in run.tell(VersionPublished(replica="policy", version=4))]
    loads = {order.holder for order in orders if isinstance(order, LoadVersion)}
    assert loads == {"", "near"}, "the second has it from the first"
    run.load("near", ("near:1",), version=4)
    assert run.order(run.joined("new", "host-b")).holder == "far", "which is being sent it"
    run.load("far", ("far:1",), version=4)
    assert run.order(run.joined("newer", "host-c")).holder == "near", "far sends it already"


def test_nobody_is_sent_to_who_may_hang():
    run = Run("near", "far")
    run.now += 8.0
    run.tell(Progress(replica="far", count=1))
    assert run.order(run.joined("new", "host-a")).holder == "far"
    run.now += 8.0
    assert run.order(run.joined("newer", "host-a")).endpoints == ("p",)


def test_nobody_is_sent_to_who_has_an_older_version_or_is_gone():
    run = Run("near", "far")
    run.tell(ReplicaLeft(replica="near", reason="killed"))
    assert run.order(run.joined("new", "host-a")).holder == "far"
    run.tell(VersionPublished(replica="policy", version=4))
    run.tell(LoadFailed(replica="far", version=4, reason="no memory"))
    assert run.order(run.joined("newer", "host-a")).endpoints == ("p",)


def test_an_order_to_load_from_a_rollout_names_a_policy_that_knows_the_tensors():
    run = Run("near")
    assert run.order(run.joined("new", "host-a")).described_by == ("p",)
    run.tell(ReplicaLeft(replica="near", reason="killed"))
    assert run.order(run.joined("newer", "host-b")).described_by == (), "it is the policy itself"
