"""The controller against a policy replica of two that is lost for good, be they fixed or elastic.

Whatever happens, the run ends, and a checkpoint that is written at its end has exactly those groups
in its weights that are not unfinished in its cut: whoever resumes trains on none twice.
"""

from dataclasses import replace

import pytest
from control_promises import check_stopped
from control_replica import Replica
from control_world import POLICIES, World
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule, run_state_machine_as_test

from cosmos_core.control import (
    ALL_DONE,
    STOPPED,
    Controller,
    EnduranceConfig,
    line_of_cut,
    step_of_cut,
)
from cosmos_core.control.ending import LOST
from cosmos_core.lineage import is_on_line
from cosmos_core.messages import (
    Command,
    Event,
    ReplicaLeft,
    StepFinished,
    Stop,
    StopRequested,
    Train,
)

ASKED = "ctrl-c"


class LosingWorld(World):
    """A world of two policy replicas, one of which dies for good when Hypothesis wants it to."""

    endurance = EnduranceConfig(failing_s=0.0, standstill_s=40.0, step_attempts=8)

    def __init__(self) -> None:
        super().__init__()
        self.lost = ""
        self.has_lost_steps = False
        self.learned: dict[str, dict[int, tuple[int, ...]]] = {}
        """By process: the prompts of each step that its weights have learned from."""
        self.on_disk: dict[int, tuple[int, ...]] = {}

    @initialize(
        depth=st.integers(0, 2), every=st.integers(0, 3), min_policies=st.sampled_from([0, 2])
    )
    def begin(self, depth, every, min_policies) -> None:
        super().begin(depth, 1, False, False, every, "block", 1)
        self.replicas.clear()
        self.stream.clear()
        self.config = replace(self.config, num_policies=2, min_policies=min_policies)
        self.controller, self.shadow = Controller(self.config), Controller(self.config)
        for name in ("rollout-0", "rollout-1", *POLICIES):
            self.start(name)

    # ------------------------------------------------------------ what processes do

    def start(self, name: str) -> None:
        if name == self.lost:
            return
        super().start(name)
        self.learned[self.replicas[name].incarnation] = dict(self.on_disk)

    def say(self, replica: Replica, event: Event) -> None:
        if replica.name != self.lost:
            super().say(replica, event)

    def obey(self, replica: Replica, command: Command, *, has_room: bool) -> None:
        if isinstance(command, Train):
            self.help(replica, command)
            if self.lost and command.step == replica.version and not self.is_met(replica, command):
                self.die(replica)  # it has waited for the other one for too long
                return
        if isinstance(command, Stop) and replica.name in POLICIES:
            self.stop_policy(replica, command)
        else:
            super().obey(replica, command, has_room=has_room)

    def help(self, replica: Replica, train: Train) -> None:
        """Elastic replicas give each other the weights that a step needs."""
        for other in self.policies():
            is_there = other.is_alive and other.num_fall_backs == len(train.line)
            if self.config.min_policies and is_there and other.version > replica.version:
                replica.version, replica.num_fall_backs = other.version, other.num_fall_backs
                self.learned[replica.incarnation] = dict(self.learned[other.incarnation])
                step, lineage = replica.version - 1, replica.num_fall_backs
                self.say(replica, StepFinished(replica=replica.name, step=step, lineage=lineage))

    def take_step(self, policy: Replica, train: Train, *, has_room: bool) -> None:
        ordinals = tuple(int(group[0].key.split("/")[0].split(".")[2]) for group in train.groups)
        self.learned[policy.incarnation][train.step] = ordinals
        super().take_step(policy, train, has_room=has_room)

    def save(self, replica: Replica) -> None:
        super().save(replica)
        if replica.version:
            self.on_disk = dict(self.learned[replica.incarnation])

    def stop_policy(self, policy: Replica, stop: Stop) -> None:
        """As a policy replica does it: it saves only what the cut is of."""
        line, version = line_of_cut(stop.cut), step_of_cut(stop.cut)
        is_on = is_on_line(line, policy.num_fall_backs, policy.version)
        if is_on and policy.version > version:
            return  # it is given another cut
        if is_on and policy.version == version:
            resumed = Controller.from_cut(self.config, stop.cut)
            learned = self.learned[policy.incarnation]
            ordinals = [ordinal for step in learned.values() for ordinal in step]
            assert sorted(learned) == list(range(version))
            assert not set(ordinals) & set(resumed.state.groups), "trained on again by who resumes"
            assert resumed.books().consumed == len(ordinals), "lost by who resumes"
            self.save(policy)
        policy.is_alive = False
        self.say(policy, ReplicaLeft(replica=policy.name, reason=STOPPED))

    def die(self, policy: Replica) -> None:
        policy.is_alive = False
        if self.controller.incarnation_of(policy.name) == policy.incarnation:
            self.handle(ReplicaLeft(replica=policy.name, reason="lost the others"))
        self.start(policy.name)

    # ------------------------------------------------------------ what may happen

    @precondition(lambda self: not self.lost)
    @rule(
        which=st.integers(0, 1),
        rounds=st.integers(0, 6),
        seed=st.integers(0, 1000),
        taken=st.integers(0, 3),
        says=st.booleans(),
    )
    def lose_one(self, which, rounds, seed, taken, says) -> None:
        """One dies for good in a step that both have taken, one, or nobody; maybe unsaid."""
        self.go_on(rounds, seed)
        self.begin_a_step(seed)
        for number, name in enumerate(POLICIES):
            for _ in range(6 if taken & (1 + number) else 0):
                self.act(self.replicas[name], 3)  # it does what it is told, and publishes
        policy = self.replicas[POLICIES[which]]
        policy.is_alive = False
        self.lost = policy.name
        if says and self.controller.incarnation_of(policy.name) == policy.incarnation:
            self.handle(ReplicaLeft(replica=policy.name, reason="killed"))

    def begin_a_step(self, seed: int) -> None:
        """Have rollouts work until a step is formed."""
        for turn in range(30):
            if self.controller.state.training is not None:
                return
            for name in list(self.replicas):
                if name not in POLICIES:
                    for choice in range(6):
                        self.act(self.replicas[name], seed * 13 + turn * 7 + choice)
                while self.stream.get(name):
                    self.deliver(name)

    @precondition(lambda self: self.lost and not self.controller.state.stopping)
    @rule()
    def stop(self) -> None:
        self.handle(StopRequested(reason=ASKED))

    def settle(self) -> None:
        super().settle()
        assert self.controller.finished, self.controller.waiting_for(self.now)

    def check_end(self) -> None:
        if self.controller.finished == ALL_DONE:
            super().check_end()
        elif self.controller.finished != LOST:
            check_stopped(self.controller)


@pytest.mark.parametrize(
    "num_examples", [25, pytest.param(3000, marks=[pytest.mark.thorough, pytest.mark.slow])]
)
def test_a_run_that_loses_a_policy_for_good_ends_with_a_cut_of_its_weights(num_examples) -> None:
    calm = [HealthCheck.too_slow, HealthCheck.filter_too_much]
    steps = settings(stateful_step_count=15, deadline=None, suppress_health_check=calm)
    run_state_machine_as_test(LosingWorld, settings=settings(steps, max_examples=num_examples))
