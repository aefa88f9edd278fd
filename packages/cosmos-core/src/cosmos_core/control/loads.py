"""Who is to load which weights: replicas that are behind, the newest, from who serves it."""

from collections.abc import Callable, Iterable

from cosmos_core.control.state import UNKNOWN_VERSION, ControllerState, ReplicaState
from cosmos_core.messages import LoadVersion

_LIVELY_S = 5.0
"""A rollout replica silent for longer may hang: a newcomer would wait for it for a minute."""


def order_loads(
    state: ControllerState,
    names: Iterable[str],
    now: float,
    is_pinned: Callable[[ReplicaState], bool],
) -> list[tuple[str, LoadVersion]]:
    """Return the orders to those of the named rollout replicas that can follow one now.

    One that is loading is asked again when it is done; one that failed, after a pause; one that is
    pinned keeps its version. One that has loaded nothing yet is sent to a rollout replica that
    serves the version, so that a newcomer costs the policy nothing; if that fails, to the policy.
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
            holder = _nearest_holder(state, replica, target, now)
            replica.loading, replica.loading_from = target, holder.name if holder else ""
            order = LoadVersion(
                version=target,
                endpoints=holder.endpoints if holder else servers[replica.seat % len(servers)],
                lineage=len(state.line),
                holder=replica.loading_from,
            )
            orders.append((name, order))
    return orders


def _nearest_holder(
    state: ControllerState, newcomer: ReplicaState, target: int, now: float
) -> ReplicaState | None:
    """Return who else has the version: of the same machine if there is one, each in its turn."""
    if newcomer.has_loaded or newcomer.failed_loads:
        return None
    holders = [
        replica
        for replica in state.rollouts()
        if replica.endpoints
        and replica.version == target
        and not replica.leaving
        and now - replica.seen_s < _LIVELY_S
    ]
    near = [replica for replica in holders if replica.host == newcomer.host]
    found = near or holders
    return found[newcomer.seat % len(found)] if found else None
