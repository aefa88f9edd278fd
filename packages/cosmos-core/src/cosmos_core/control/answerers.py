"""Who answers a validation while others go on with training, and with how many of its places.

Who answers keeps its version, and training may have samples of that as far as the bound on
staleness alone. So of several rollout replicas half answer, with all their places, and the others
load what is published. One that is alone has half of its places for a validation, until the bound
lets it have no more prompts of training; then it has all of them, and training waits.
"""

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cosmos_core.control.state import UNKNOWN_VERSION, ReplicaState, RoundState


@dataclass(frozen=True, slots=True)
class Answerers:
    """Who answers.

    Attributes:
        chosen: the prompts that each of them holds, by name; of some none yet.
        are_alone: whether nobody else can sample for training.
    """

    chosen: dict[str, int]
    are_alone: bool

    def places(self, replica: ReplicaState, may_train: Callable[[int], bool]) -> int:
        """Return how many prompts of the validation one of them may hold at once.

        Args:
            replica: that answers.
            may_train: whether a prompt of training may be given to who holds a version.
        """
        if self.are_alone and may_train(replica.version):
            return max(1, replica.slots // 2)
        return replica.slots


def choose(opened: RoundState, rollouts: Sequence[ReplicaState]) -> Answerers:
    """Return who answers: who does so already, and others that hold the version, the freest first.

    Who rests or leaves is the last to be chosen, since it answers nothing now.
    """
    chosen = {name: count for name, count in opened.chosen.items() if count}
    usable = [r for r in rollouts if r.version != UNKNOWN_VERSION and not _is_out(r)]
    holders = [r for r in rollouts if holds(r, opened.version) and r.name not in chosen]
    room = max(0, max(1, len(usable) // 2) - len(chosen))
    if room < len(holders):

        def order(replica: ReplicaState) -> tuple[bool, bool, int, str]:
            name = replica.name
            return _is_out(replica), name not in opened.chosen, -replica.free, name

        holders = heapq.nsmallest(room, holders, key=order)
    chosen |= {replica.name: 0 for replica in holders}
    return Answerers(chosen, are_alone=all(replica.name in chosen for replica in usable))


def choose_all(opened: RoundState, rollouts: Sequence[ReplicaState]) -> Answerers:
    """Return who answers where nobody trains meanwhile: all that hold the version."""
    chosen = {r.name: 0 for r in rollouts if holds(r, opened.version)}
    chosen |= {name: count for name, count in opened.chosen.items() if count}
    return Answerers(chosen, are_alone=False)


def holds(replica: ReplicaState, version: int) -> bool:
    """Tell whether a replica has a version and is not told to load another."""
    return replica.version == version and replica.loading == UNKNOWN_VERSION


def _is_out(replica: ReplicaState) -> bool:
    return replica.resting or replica.leaving
