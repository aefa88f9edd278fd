"""Fewer rollout replicas while a run goes on: the last to come finish what they hold, and leave.

::

    ScaleRequested(2)    rollout-0   rollout-1   rollout-2: leaving ─(its groups are back)► Stop
"""

from cosmos_core.control.replicas import ReplicaTable
from cosmos_core.control.state import ControllerState
from cosmos_core.messages import Stop

SCALED_DOWN = "fewer rollout replicas are wanted"


def dismiss(state: ControllerState, replicas: ReplicaTable) -> list[tuple[str, Stop]]:
    """Have replicas beyond the wanted number leave; return the orders to those that are done."""
    if state.wanted_rollouts < 0:
        return []
    orders: list[tuple[str, Stop]] = []
    staying = [replica for replica in state.rollouts() if not replica.dismissed]
    staying.sort(key=lambda replica: replica.seat)
    for index, replica in enumerate(staying):
        replicas.set_leaving(replica, is_leaving=index >= state.wanted_rollouts)
        if replica.leaving and not replica.busy:
            replica.dismissed = True
            orders.append((replica.name, Stop(reason=SCALED_DOWN)))
    return orders
