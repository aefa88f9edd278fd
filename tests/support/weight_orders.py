"""A controller that is told what becomes of weights, and whom it sends rollouts to for them."""

from collections.abc import Mapping, Sequence

from cosmos_core.control import Controller, ControllerConfig
from cosmos_core.control.state import ControllerState
from cosmos_core.messages import (
    Command,
    Event,
    LoadVersion,
    ReplicaJoined,
    VersionLoaded,
    VersionPublished,
)


class Run:
    """Policies that have published version 3, and rollouts that have loaded it.

    Args:
        rollouts: the machine of each, by its name; they join in this order.
        starts: rollouts join before there is a version, and are ordered to load it: ``first``.
        ranks: of each.
        policies: the machine of each.
        policy_ranks: of each.
    """

    def __init__(
        self,
        rollouts: Mapping[str, str],
        *,
        ranks: int = 1,
        policies: Sequence[str] = ("p",),
        policy_ranks: int = 1,
        starts: bool = False,
    ) -> None:
        config = ControllerConfig(
            num_steps=9, groups_per_step=1, samples_per_group=2, num_policies=len(policies)
        )
        self.controller = Controller(config, ControllerState(step=3))
        self.now, self.ranks = 0.0, ranks
        self.first: dict[str, LoadVersion] = {}
        for name, host in rollouts.items() if starts else ():
            self.join(name, host, serves=True)
        self.policies = [f"policy-{i}" for i in range(len(policies))]
        for name, host in zip(self.policies, policies, strict=True):
            endpoints = tuple(f"{name}:{rank}" for rank in range(policy_ranks))
            joined = ReplicaJoined(
                replica=name, role="policy", version=3, endpoints=endpoints, host=host
            )
            self.first |= self.tell(joined)
            self.first |= self.tell(VersionPublished(replica=name, version=3))
        for name, host in () if starts else rollouts.items():
            self.join(name, host)
            self.loaded(name, 3)

    def tell(self, event: Event) -> dict[str, LoadVersion]:
        """Return the orders to load that come of an event."""
        self.now += 0.01
        told: list[tuple[str, Command]] = self.controller.handle(event, self.now)
        return {name: command for name, command in told if isinstance(command, LoadVersion)}

    def join(self, name: str, host: str, *, serves: bool = False) -> dict[str, LoadVersion]:
        endpoints = self.endpoints(name) if serves else ()
        return self.tell(
            ReplicaJoined(
                replica=name, role="rollout", slots=1, version=-1, host=host, endpoints=endpoints
            )
        )

    def endpoints(self, name: str) -> tuple[str, ...]:
        return tuple(f"{name}:{rank}" for rank in range(self.ranks))

    def loaded(self, name: str, version: int, *, serves: bool = True) -> dict[str, LoadVersion]:
        endpoints = self.endpoints(name) if serves else ()
        return self.tell(
            VersionLoaded(
                replica=name, version=version, transfer_s=0, stall_s=0, endpoints=endpoints
            )
        )

    def publish(self, version: int) -> dict[str, LoadVersion]:
        orders: dict[str, LoadVersion] = {}
        for policy in self.policies:
            orders |= self.tell(VersionPublished(replica=policy, version=version))
        return orders

    def sources(self, version: int) -> dict[str, str]:
        """Publish a version; return whom each rollout is to fetch it from."""
        orders = self.publish(version)
        assert {order.version for order in orders.values()} <= {version}
        return {name: source_of(order) for name, order in orders.items()}


def source_of(order: LoadVersion) -> str:
    source = order.endpoints[0].partition(":")[0]
    assert order.holder == ("" if source.startswith("policy") else source)
    return source
