"""Fewer replicas while a run goes on: the last to come finish what they hold, and leave.

Of policy replicas, those that are behind leave first: who has the weights of the step stays.

::

    ScaleRequested(rollouts=2)    rollout-2: leaving ─(its groups are back)► Stop
    ScaleRequested(policies=1)    policy-1: ─(the step in hand)► Stop
"""

from cosmos_core.control.config import ControllerConfig
from cosmos_core.control.replicas import ReplicaTable
from cosmos_core.control.state import ControllerState
from cosmos_core.messages import SCALED_DOWN, ScaleRequested, Stop


def ask(state: ControllerState, config: ControllerConfig, wish: ScaleRequested) -> None:
    """Note how many replicas are wanted; policy replicas only where they come and go."""
    if wish.rollouts >= 0:
        state.wanted_rollouts = wish.rollouts
    if wish.policies >= 0 and config.min_policies:
        state.wanted_policies = max(config.min_policies, wish.policies)


def dismiss(state: ControllerState, replicas: ReplicaTable) -> list[tuple[str, Stop]]:
    """Have replicas beyond the wanted number leave; return the orders to those that are done."""
    orders: list[tuple[str, Stop]] = []
    if state.wanted_rollouts >= 0:
        staying = [replica for replica in state.rollouts() if not replica.dismissed]
        staying.sort(key=lambda replica: replica.seat)
        for index, replica in enumerate(staying):
            replicas.set_leaving(replica, is_leaving=index >= state.wanted_rollouts)
            if replica.leaving and not replica.busy:
                replica.dismissed = True
                orders.append((replica.name, Stop(reason=SCALED_DOWN)))
    if state.wanted_policies >= 0:
        staying = [replica for replica in state.policies() if not replica.dismissed]
        staying.sort(key=lambda replica: (replica.version < state.step, replica.seat))
        for replica in staying[state.wanted_policies :]:
            # it reads the order when it has taken the step in hand
            replica.leaving = replica.dismissed = True
            orders.append((replica.name, Stop(reason=SCALED_DOWN)))
    return orders
