"""The controller against everything at once: joins, deaths, silence, repeats, delays, restarts.

And against who operates a run: another number of rollouts is asked for, or a stop, and words of
launchers and replicas come twice.
"""

from typing import Any

import pytest
from control_promises import check_stopped
from control_replica import Replica
from control_world import World
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule, run_state_machine_as_test

from cosmos_core.control import (
    ALL_DONE,
    EQUAL,
    FAILING,
    STANDSTILL,
    UNREWARDED,
    EnduranceConfig,
)
from cosmos_core.control.ending import LOST
from cosmos_core.messages import ReplicaJoined, ReplicaLeft, ScaleRequested, StopRequested

ROLLOUTS = ("rollout-0", "rollout-1")
ASKED = "ctrl-c"
EQUAL_REWARDS, NO_REWARDS, NO_ENGINE = 5, 11, 14
"""Choices of a world with which a group ends in the same way each time."""
LIMITS = (EQUAL, FAILING, STANDSTILL, UNREWARDED)


class OperatedWorld(World):
    """A world that somebody looks after."""

    def __init__(self) -> None:
        super().__init__()
        self.is_asked_to_stop = False
        self.has_died = False

    def note_death(self) -> None:
        super().note_death()
        self.has_died = True

    @rule(wanted=st.integers(0, 2), policies=st.integers(-1, 2))
    def scale(self, wanted: int, policies: int) -> None:
        """As the launcher does it: those that are missing are started."""
        self.handle(ScaleRequested(rollouts=wanted, policies=policies))
        for name in ROLLOUTS[:wanted]:
            if not self.replicas[name].is_alive:
                self.start(name)

    @precondition(lambda self: not self.is_asked_to_stop)
    @rule(rounds=st.integers(0, 25), seed=st.integers(0, 1000))
    def stop(self, rounds: int, seed: int) -> None:
        """Not before some steps were taken, or most of what happens would happen to its end."""
        self.go_on(rounds, seed)
        self.is_asked_to_stop = not self.controller.state.stopping
        self.handle(StopRequested(reason=ASKED))

    @rule(which=st.integers(0, 3))
    def join_twice(self, which: int) -> None:
        """What a replica said when it joined comes again, whatever has happened to it since."""
        name = self.name_of(which)
        known, replica = self.controller.state.replicas.get(name), self.replicas[name]
        if known is None or known.incarnation != replica.incarnation:
            return
        seat, lost = known.seat, self.controller.state.counters.replicas_lost
        joined = next(
            event
            for incarnation, event in reversed(self.said)
            if isinstance(event, ReplicaJoined) and incarnation == known.incarnation
        )
        self.handle(joined)
        assert self.controller.state.replicas[name] is known
        assert known.seat == seat
        assert self.controller.state.counters.replicas_lost == lost

    @rule(which=st.integers(0, 3), times=st.integers(1, 3))
    def leave(self, which: int, times: int) -> None:
        """A launcher says of one that lives that it is dead, as of the one before it, too late."""
        name = self.name_of(which)
        self.note_death()
        for _ in range(times):
            self.handle(ReplicaLeft(replica=name, reason="killed"))
            assert self.controller.incarnation_of(name) is None

    def settle(self) -> None:
        self.handle(ScaleRequested(rollouts=len(ROLLOUTS)))
        super().settle()

    def check_end(self) -> None:
        if not self.is_asked_to_stop:
            super().check_end()
            return
        ends = {ASKED, *({f"{ASKED}; {LOST}"} if self.has_died else ())}
        assert self.controller.finished in ends, self.controller.waiting_for(self.now)
        check_stopped(self.controller)


class HastyWorld(World):
    """A world whose runs end when they get no further for a little while."""

    endurance = EnduranceConfig(
        unrewarded_samples=4,
        unrewarded_in_a_row=6,
        equal_groups=3,
        failing_s=20.0,
        standstill_s=40.0,
    )

    def __init__(self) -> None:
        super().__init__()
        self.mood = 0

    @rule(mood=st.sampled_from([0, EQUAL_REWARDS, NO_REWARDS, NO_ENGINE]))
    def change_mood(self, mood: int) -> None:
        """From now on, and to its end, all groups of the run come to the same."""
        self.mood = mood

    def finish_group(self, replica: Replica, choice: int) -> None:
        super().finish_group(replica, self.mood or choice)

    def check_end(self) -> None:
        finished = self.controller.finished
        if finished in {ALL_DONE, LOST}:
            super().check_end()
            return
        assert finished.startswith(LIMITS), self.controller.waiting_for(self.now)
        assert self.config.drop_zero_signal or not finished.startswith(EQUAL)
        has_reward = self.controller.state.endurance.has_reward
        if finished.startswith(UNREWARDED):
            assert has_reward == finished.startswith(f"{UNREWARDED} any more")
        check_stopped(self.controller)


def _explore(world: Any, num_examples: int) -> None:
    calm = [HealthCheck.too_slow, HealthCheck.filter_too_much]
    steps = settings(stateful_step_count=25, deadline=None, suppress_health_check=calm)
    run_state_machine_as_test(world, settings=settings(steps, max_examples=num_examples))


@pytest.mark.parametrize(
    "num_examples", [50, pytest.param(3000, marks=[pytest.mark.thorough, pytest.mark.slow])]
)
def test_the_controller_holds_in_any_world(num_examples: int) -> None:
    _explore(World, num_examples)


@pytest.mark.parametrize(
    "num_examples", [50, pytest.param(3000, marks=[pytest.mark.thorough, pytest.mark.slow])]
)
def test_the_controller_holds_in_a_world_that_somebody_operates(num_examples: int) -> None:
    _explore(OperatedWorld, num_examples)


@pytest.mark.parametrize(
    "num_examples", [50, pytest.param(3000, marks=[pytest.mark.thorough, pytest.mark.slow])]
)
def test_the_controller_holds_in_a_world_whose_runs_give_up_soon(num_examples: int) -> None:
    _explore(HastyWorld, num_examples)
