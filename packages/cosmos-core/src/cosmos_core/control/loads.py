"""Who is to load which weights: replicas that are behind, the newest, from who serves it."""

from collections.abc import Callable, Iterable

from cosmos_core.control.state import UNKNOWN_VERSION, ControllerState, ReplicaState
from cosmos_core.messages import LoadVersion


def order_loads(
    state: ControllerState,
    names: Iterable[str],
    now: float,
    is_pinned: Callable[[ReplicaState], bool],
) -> list[tuple[str, LoadVersion]]:
    """Return the orders to those of the named rollout replicas that can follow one now.

    One that is loading is asked again when it is done; one that failed, after a pause; one that is
    pinned keeps its version.
    """
    policies = state.policies()
    target = max((policy.published for policy in policies), default=UNKNOWN_VERSION)
    servers = [p.endpoints for p in policies if p.published == target and p.endpoints]
    if not servers or target == UNKNOWN_VERSION:
        return []
    orders: list[tuple[str, LoadVersion]] = []
    for name in names:
        replica = state.replicas.get(name)
        if (
            replica is not None
            and replica.role == "rollout"
            and replica.version < target
            and replica.loading == UNKNOWN_VERSION
            and now >= replica.retry_at_s
            and not is_pinned(replica)
        ):
            replica.loading = target
            endpoints = servers[replica.seat % len(servers)]
            order = LoadVersion(version=target, endpoints=endpoints, lineage=len(state.line))
            orders.append((name, order))
    return orders
