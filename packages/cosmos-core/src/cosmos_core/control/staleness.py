"""Staleness: when a prompt may be given out, and which groups the next step trains on.

A group whose oldest token may be of version w must be trained on by step w + bound: its deadline.
Under ``block`` a prompt is given out only while the schedule "earliest deadline first" stays
feasible: for every step d, the groups due by d fit into the steps from the next one to d. A step
is formed only if what it leaves behind stays feasible, or else it waits for stragglers. So no
deadline is missed and nothing is dropped. With a bound of 2 and two groups in a step::

    next step 5     due at 5: 1    due at 6: 3    due at 7: 1        room by 5, 6, 7: 2, 4, 6
    one more of version 3 (due at 5): 2, 5 by 6 > 4: no.  Of version 5 (due at 7): 6 by 7: yes.
"""

import heapq
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from cosmos_core.control.config import StalenessConfig
from cosmos_core.control.state import GroupState

Dispatched = Callable[[], Iterable[GroupState]]


@dataclass(frozen=True, slots=True)
class Load:
    """The groups that have been given out and not been trained on, counted by deadline.

    Attributes:
        step: the step that is formed next.
        groups_per_step: how many groups it takes.
        generating: groups still being sampled, by deadline.
        ready: groups that can be trained on, by deadline.
    """

    step: int
    groups_per_step: int
    generating: Mapping[int, int]
    ready: Mapping[int, int]


class StalenessPolicy(Protocol):
    """Decides on admission and on the composition of steps; has no state."""

    def may_dispatch(self, load: Load, deadline: int) -> bool:
        """Tell whether a prompt with this deadline may be given out."""
        ...

    def choose(self, load: Load, dispatched: Dispatched) -> list[GroupState] | None:
        """Return the groups of the next step, in any order, or ``None`` if it has to wait."""
        ...

    def is_expired(self, load: Load, deadline: int) -> bool:
        """Tell whether a ready group with this deadline may no longer be trained on."""
        ...


@dataclass(frozen=True, slots=True)
class Block:
    """Hold the bound by waiting for stragglers; drops nothing."""

    bound: int

    def may_dispatch(self, load: Load, deadline: int) -> bool:
        """Tell whether everything given out, and this, can be trained on in time."""
        due = _sum_of(load.generating, load.ready)
        due[deadline] = due.get(deadline, 0) + 1
        return first_overdue(due, load.step, load.groups_per_step) is None

    def choose(self, load: Load, dispatched: Dispatched) -> list[GroupState] | None:
        """Take the earliest deadlines, unless a straggler would then come too late."""
        left = dict(load.ready)
        room = load.groups_per_step
        for due in sorted(left):
            taken = min(room, left[due])
            left[due] -= taken
            room -= taken
        if room:
            return None
        left = _sum_of(left, load.generating)
        overdue = first_overdue(left, load.step + 1, load.groups_per_step)
        if overdue is not None and any(due <= overdue for due in load.generating):
            return None
        return _earliest(dispatched(), load.groups_per_step)

    def is_expired(self, load: Load, deadline: int) -> bool:
        """Tell whether the deadline has passed; it cannot unless a replica misreports versions."""
        return deadline < load.step


@dataclass(frozen=True, slots=True)
class Drop:
    """Hold the bound by dropping what comes too late, which favours short answers."""

    bound: int

    def may_dispatch(self, load: Load, deadline: int) -> bool:
        """Tell whether the prompt could be trained on if it came back at once."""
        return deadline >= load.step

    def choose(self, load: Load, dispatched: Dispatched) -> list[GroupState] | None:
        """Take the earliest deadlines of what is ready; wait for nobody."""
        if sum(load.ready.values()) < load.groups_per_step:
            return None
        return _earliest(dispatched(), load.groups_per_step)

    def is_expired(self, load: Load, deadline: int) -> bool:
        """Tell whether the deadline has passed."""
        return deadline < load.step


@dataclass(frozen=True, slots=True)
class Count:
    """Admit by depth alone, as AReaL's first rule does; stragglers may exceed any bound."""

    def may_dispatch(self, load: Load, deadline: int) -> bool:
        """Admit; the depth has been looked at already."""
        del load, deadline
        return True

    def choose(self, load: Load, dispatched: Dispatched) -> list[GroupState] | None:
        """Take the earliest deadlines of what is ready; wait for nobody."""
        if sum(load.ready.values()) < load.groups_per_step:
            return None
        return _earliest(dispatched(), load.groups_per_step)

    def is_expired(self, load: Load, deadline: int) -> bool:
        """Train on everything."""
        del load, deadline
        return False


@dataclass(frozen=True, slots=True)
class Window:
    """Train in nearly the order of issue: of the oldest groups, take those that are ready."""

    share: float

    def may_dispatch(self, load: Load, deadline: int) -> bool:
        """Admit; the depth has been looked at already."""
        del load, deadline
        return True

    def choose(self, load: Load, dispatched: Dispatched) -> list[GroupState] | None:
        """Take the first ready ones within the window, if they make a step."""
        groups = list(dispatched())
        wanted = round((1 + self.share) * load.groups_per_step, 9)  # 1.1 * 50 is more than 55
        size = math.ceil(min(wanted, len(groups)))
        oldest = heapq.nsmallest(size, groups, key=lambda group: group.ordinal)
        ready = [group for group in oldest if group.stage == "ready"]
        if len(ready) < load.groups_per_step:
            return None
        return ready[: load.groups_per_step]

    def is_expired(self, load: Load, deadline: int) -> bool:
        """Train on everything."""
        del load, deadline
        return False


def policy_of(config: StalenessConfig) -> StalenessPolicy:
    """Return the policy that a configuration names."""
    match config.policy:
        case "block":
            return Block(config.bound)
        case "drop":
            return Drop(config.bound)
        case "count":
            return Count()
        case "window":
            return Window(config.window)


def first_overdue(due: Mapping[int, int], step: int, groups_per_step: int) -> int | None:
    """Return the first step by which more is due than fits, ``None`` if everything fits.

    Example:
        >>> first_overdue({5: 2, 6: 2}, step=5, groups_per_step=2)
        >>> first_overdue({5: 1, 6: 4}, step=5, groups_per_step=2)
        6
    """
    total = 0
    for deadline in sorted(due):
        total += due[deadline]
        if due[deadline] and total > max(0, deadline - step + 1) * groups_per_step:
            return deadline
    return None


def _sum_of(first: Mapping[int, int], second: Mapping[int, int]) -> dict[int, int]:
    total = dict(first)
    for due, count in second.items():
        total[due] = total.get(due, 0) + count
    return total


def _earliest(dispatched: Iterable[GroupState], count: int) -> list[GroupState]:
    ready = (group for group in dispatched if group.stage == "ready")
    return heapq.nsmallest(count, ready, key=lambda group: (group.version, group.ordinal))
