"""What the orders of a controller keep, whatever happens around it."""

import itertools
from collections import Counter
from typing import Protocol

from cosmos_core.control import Controller, ControllerState, step_of_cut
from cosmos_core.messages import LoadVersion, Train


class Serving(Protocol):
    """A policy replica: which process it is, and what that one serves."""

    incarnation: str
    published: int


def check_step(train: Train, controller: Controller, trained: dict[int, tuple[int, ...]]) -> None:
    """Hold that a step is whole, of prompts that no other step has, and within the bound.

    Args:
        train: the order.
        controller: that gave it.
        trained: the prompts of steps ordered before; those of this step or later are void.
    """
    config = controller.config
    for later in [step for step in trained if step >= train.step]:
        del trained[later]
    assert len(train.groups) == config.groups_per_step
    ordinals = tuple(int(group[0].key.split("/")[0].split(".")[2]) for group in train.groups)
    assert list(ordinals) == sorted(set(ordinals))
    taken = set(itertools.chain(*trained.values()))
    assert not taken & set(ordinals), "a prompt is trained on twice"
    trained[train.step] = ordinals
    for group in train.groups:
        staleness = train.step - min(sample.oldest_version for sample in group)
        assert staleness >= 0
        if config.staleness.policy in {"block", "drop"}:
            assert staleness <= config.staleness.bound


def check_load(order: LoadVersion, controller: Controller, policy: Serving) -> None:
    """Hold that weights are ordered from who serves them.

    Args:
        order: to load weights.
        controller: that gave it.
        policy: the replica whose endpoint the order names, as it is now.
    """
    (name,) = order.endpoints
    if controller.incarnation_of(name) == policy.incarnation:
        assert order.version <= policy.published, "nobody serves it"


def check_rollouts(state: ControllerState) -> None:
    """Hold that none has more than it takes, nor keeps its version for a validation for nothing.

    Args:
        state: of a controller, between events.
    """
    for replica in state.rollouts():
        assert 0 <= replica.busy <= replica.slots
    if (opened := state.round) is None or state.finished:
        return  # of a run that has ended nothing but farewells are heard
    given = Counter(opened.given.values())
    assert {name: count for name, count in opened.chosen.items() if count} == given
    assert opened.chosen_slots == sum(state.replicas[name].slots for name in opened.chosen)
    assert opened.waiting or opened.chosen.keys() == given.keys()


def check_stopped(controller: Controller) -> None:
    """Hold that a run that ended before its last step can go on from its end."""
    state, config = controller.state, controller.config
    assert state.stop is not None
    consumed = state.step * config.groups_per_step
    assert controller.books().consumed == consumed <= config.num_steps * config.groups_per_step
    assert step_of_cut(state.stop) == state.step
    resumed = Controller.from_cut(config, state.stop)
    resumed.books().check()
    assert resumed.books().consumed == consumed
