"""Staleness: when a prompt may be given out, and which groups the next step trains on.

A group whose oldest token may be of version w must be trained on by step w + bound: its deadline.
Under ``block`` a prompt is given out only while the schedule "earliest deadline first" stays
feasible: for every step d, the groups due by d fit into the steps from the next one to d. Then no
deadline is ever missed, so nothing needs to be dropped, and the learner waits only where going on
without a straggler would make some group miss its deadline. With depth and bound 0 this is
synchronous on-policy training.
"""

from collections.abc import Iterable, Sequence

from cosmos_core.control.config import ControllerConfig
from cosmos_core.control.state import ControllerState, GroupState


def next_step(state: ControllerState) -> int:
    """Return the step that is formed next; one past the step in hand, if there is one."""
    return state.step + (state.training is not None)


def deadline(group: GroupState, config: ControllerConfig) -> int:
    """Return the last step that may train on a group."""
    return group.version + config.staleness.bound


def may_issue(state: ControllerState, config: ControllerConfig) -> bool:
    """Tell whether the admission depth leaves room for one more prompt."""
    return len(state.groups) < (config.staleness.depth + 1) * config.groups_per_step


def may_give_out(state: ControllerState, config: ControllerConfig, version: int) -> bool:
    """Tell whether a prompt may go to a replica that samples with ``version`` or later."""
    if version < 0:
        return False
    step = next_step(state)
    if config.staleness.policy != "block":
        return version + config.staleness.bound >= step
    due = sorted(
        deadline(group, config)
        for group in state.groups.values()
        if group.stage in ("generating", "ready")
    )
    return is_feasible([*due, version + config.staleness.bound], step, config.groups_per_step)


def is_feasible(deadlines: Iterable[int], step: int, groups_per_step: int) -> bool:
    """Tell whether groups with these deadlines fit into steps of a fixed size from ``step`` on.

    Example:
        >>> is_feasible([5, 5, 6], step=5, groups_per_step=2)
        True
        >>> is_feasible([5, 5, 5], step=5, groups_per_step=2)
        False
    """
    return all(
        due >= step and count <= (due - step + 1) * groups_per_step
        for count, due in enumerate(sorted(deadlines), start=1)
    )


def choose_step(state: ControllerState, config: ControllerConfig) -> Sequence[str] | None:
    """Return the groups of the next step in order of group id, or ``None`` if it must wait.

    Of what is ready the earliest deadlines are taken, then the lowest ordinals. Under ``block``
    the step waits for stragglers as long as what it leaves behind could not be trained on in time.
    """
    ready = [
        (deadline(group, config), group.group, key)
        for key, group in state.groups.items()
        if group.stage == "ready"
    ]
    if len(ready) < config.groups_per_step:
        return None
    chosen = sorted(ready)[: config.groups_per_step]
    keys = [key for _, _, key in sorted(chosen, key=lambda entry: entry[1])]
    if config.staleness.policy == "block" and not _leaves_feasible(state, config, set(keys)):
        return None
    return keys


def _leaves_feasible(state: ControllerState, config: ControllerConfig, chosen: set[str]) -> bool:
    """Tell whether all other groups can still be trained on in time once ``chosen`` are."""
    others = [
        deadline(group, config)
        for key, group in state.groups.items()
        if group.stage in ("generating", "ready") and key not in chosen
    ]
    return is_feasible(others, state.step + 1, config.groups_per_step)


def too_stale(state: ControllerState, config: ControllerConfig) -> list[str]:
    """Return the ready groups that the next step may no longer train on."""
    if config.staleness.policy == "count" or state.step >= config.num_steps:
        return []
    return [
        key
        for key, group in state.groups.items()
        if group.stage == "ready" and deadline(group, config) < state.step
    ]
