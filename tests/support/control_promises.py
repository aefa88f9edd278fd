"""What the orders of a controller keep, whatever happens around it."""

import itertools
from collections import Counter
from collections.abc import Sequence

from control_replica import Replica

from cosmos_core.control import Controller, ControllerState, step_of_cut
from cosmos_core.lineage import is_on_line
from cosmos_core.messages import Event, LoadFailed, LoadVersion, Train


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


def check_load(
    order: LoadVersion, controller: Controller, source: Replica, unheard: Sequence[Event]
) -> None:
    """Hold that weights are ordered from who serves them, or is sent them, and are the run's.

    Args:
        order: to load weights.
        controller: that gave it.
        source: the replica whose endpoint the order names, as it is now.
        unheard: what that one has said and the controller has not heard.
    """
    if controller.incarnation_of(source.name) != source.incarnation:
        return
    if not order.holder:
        assert order.version <= source.published, "nobody serves it"
        return
    assert order.holder == source.name
    has_failed = any(isinstance(e, LoadFailed) and e.version == order.version for e in unheard)
    if source.gives(order):
        version, lineage = source.loaded
        assert is_on_line(controller.state.line, lineage, version), "they are of lost weights"
    else:
        assert source.will_give(order) or has_failed or not source.is_alive, "nobody sends it"


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
