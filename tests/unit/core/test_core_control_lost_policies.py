"""Steps that lack a policy replica, or kill one each time: how runs end, with which cut."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from control_run import CONFIG, SHORT, Run

from cosmos_core.control import DEADLY, STANDSTILL, Controller, step_of_cut
from cosmos_core.control.ending import LOST
from cosmos_core.messages import (
    CheckpointSaved,
    LoadVersion,
    ReplicaJoined,
    ReplicaLeft,
    StepFinished,
    Stop,
    StopRequested,
    VersionLoaded,
    VersionPublished,
)

FIXED = replace(CONFIG, num_policies=2)
ELASTIC = replace(CONFIG, num_policies=2, min_policies=2)
THREE = replace(CONFIG, num_policies=3)
SOON = replace(FIXED, first_lease_s=60.0, lease_s=30.0)


class Policies(Run):
    """A run of several policy replicas in its first step; it keeps the cuts that they are given."""

    def __init__(self, config=FIXED) -> None:
        self.cuts: dict[str, list[bytes]] = {}
        super().__init__(config)
        for number in range(1, config.num_policies):
            self.join(f"policy-{number}")
        self.answer(0.0, 1.0)
        self.answer(0.0, 1.0)
        assert len(self.trains) == config.num_policies

    def take(self, commands) -> None:
        super().take(commands)
        for name, command in commands:
            if isinstance(command, Stop) and name.startswith("policy"):
                self.cuts.setdefault(name, []).append(command.cut)
            elif isinstance(command, LoadVersion):
                times = {"transfer_s": 0.0, "stall_s": 0.0, "lineage": command.lineage}
                self.tell(VersionLoaded(replica=name, version=command.version, **times))

    def train(self, *names: str, step: int) -> None:
        """Have a step formed that is the next one, and replicas take it."""
        while self.controller.state.training is None:
            self.answer(0.0, 1.0)
        assert self.controller.state.step == step
        for name in names:
            self.finish(name, step)

    def join(self, name: str, version: int = 0, lineage: int = 0) -> None:
        at = {"version": version, "lineage": lineage, "incarnation": f"{name} at {self.now}"}
        self.tell(ReplicaJoined(replica=name, role="policy", endpoints=("here",), **at))

    def leave(self, name: str) -> None:
        self.tell(ReplicaLeft(replica=name, reason="killed"))

    def finish(self, name: str, step: int = 0) -> None:
        self.tell(StepFinished(replica=name, step=step))
        self.tell(VersionPublished(replica=name, version=step + 1))

    def save(self, name: str, version: int) -> None:
        path = "x" if version else ""
        self.tell(CheckpointSaved(replica=name, step=version - 1, path=path))

    def wait_alive(self, seconds: int, names: Sequence[str]) -> None:
        """Let time pass, in which some replicas are heard of."""
        for replica in self.controller.state.replicas.values():
            if replica.name in names:
                replica.seen_s = self.now + seconds
        self.wait(seconds)

    def steps_told(self, name: str) -> list[int]:
        return [step_of_cut(cut) for cut in self.cuts.get(name, [])]

    def resumed(self, name: str) -> Controller:
        return Controller.from_cut(self.controller.config, self.cuts[name][-1])


# ---------------------------------------------------------------- one is lost for good


@pytest.mark.parametrize("config", [FIXED, ELASTIC])
def test_a_step_that_lacks_a_policy_for_too_long_ends_the_run_with_a_cut_of_before_it(config):
    run = Policies(config)
    run.leave("policy-1")
    run.asked.clear()
    idle(run)
    run.wait(205)
    missing = "1 of 2 policy replicas to join beside policy-0"
    assert run.stopping == f"{STANDSTILL}: for 200 s it has waited for {missing}"
    assert run.steps_told("policy-0") == [0]
    run.save("policy-0", 0)
    assert run.controller.finished == run.stopping
    assert run.controller.books().consumed == 0
    resumed = run.resumed("policy-0")
    assert sorted(resumed.state.groups)[:2] == [0, 1], "its groups are trained on by who resumes"


@pytest.mark.parametrize("config", [FIXED, ELASTIC])
def test_a_step_that_the_one_who_is_left_has_taken_is_in_the_cut(config):
    run = Policies(config)
    if config is FIXED:
        run.finish("policy-0")
        run.leave("policy-1")
    else:  # of those that come and go one speaks for all
        run.leave("policy-1")
        run.finish("policy-0")
    idle(run)
    run.wait(205)
    assert run.steps_told("policy-0") == [1]
    run.save("policy-0", 1)
    assert run.controller.finished == run.stopping
    assert run.controller.books().consumed == 2
    resumed = run.resumed("policy-0")
    assert resumed.books().consumed == 2
    assert not {0, 1} & set(resumed.state.groups)


@pytest.mark.parametrize("config", [FIXED, ELASTIC])
def test_who_has_taken_the_step_and_says_so_after_the_stop_is_given_another_cut(config):
    """With the first one its weights would be resumed with groups that are in them."""
    run = Policies(config)
    run.leave("policy-1")
    idle(run)
    run.wait(205)
    assert run.steps_told("policy-0") == [0]
    run.restart()
    run.finish("policy-0")
    assert run.steps_told("policy-0") == [0, 1]
    assert run.controller.finished == ""
    run.save("policy-0", 1)
    assert run.controller.finished == run.stopping
    assert run.resumed("policy-0").books().consumed == 2


@pytest.mark.parametrize("config", [FIXED, ELASTIC])
def test_one_who_comes_back_after_the_stop_with_the_step_is_given_a_cut_with_it(config):
    run = Policies(config)
    run.leave("policy-1")
    idle(run)
    run.wait(205)
    run.join("policy-1", version=1)
    if config is FIXED:  # the other may have it too, and not have said so
        assert run.steps_told("policy-1") == [0]
        run.save("policy-0", 0)
        assert run.controller.finished == ""
    assert run.steps_told("policy-1") == [0, 1]
    run.save("policy-1", 1)
    run.leave("policy-0")
    assert run.controller.finished == run.stopping
    assert run.controller.books().consumed == 2


def test_who_is_ahead_of_others_waits_for_what_these_say_of_the_step() -> None:
    run = Policies(THREE)
    run.finish("policy-0")
    run.leave("policy-2")
    idle(run)
    run.wait(205)
    assert (run.steps_told("policy-0"), run.steps_told("policy-1")) == ([0], [0])
    run.finish("policy-1")
    assert (run.steps_told("policy-0"), run.steps_told("policy-1")) == ([0, 1], [0, 1])
    for name in ("policy-0", "policy-1"):
        run.save(name, 1)
    assert run.controller.finished == run.stopping


def test_who_is_ahead_is_let_go_when_the_others_are_back_with_older_weights() -> None:
    run = Policies(THREE)
    run.train("policy-0", "policy-1", "policy-2", step=0)
    run.train("policy-0", step=1)
    run.leave("policy-2")
    idle(run)
    run.wait(205)
    assert run.steps_told("policy-0") == [1]
    run.join("policy-1", version=0)
    assert run.steps_told("policy-0") == [1, 0]  # of a new lineage: it saves nothing, and leaves
    run.save("policy-1", 0)
    run.leave("policy-0")
    assert run.controller.finished == run.stopping
    assert run.stopping.endswith(LOST)


def test_a_stop_that_is_asked_for_waits_for_a_missing_policy_as_long_as_for_a_first_work() -> None:
    run = Policies(SOON)
    run.leave("policy-1")
    run.tell(StopRequested(reason="ctrl-c"))
    run.wait_alive(50, ["policy-0"])
    assert run.steps_told("policy-0") == []
    run.wait_alive(15, ["policy-0"])
    assert run.steps_told("policy-0") == [0]
    run.save("policy-0", 0)
    assert run.controller.finished == "ctrl-c"


def test_a_policy_that_is_back_in_time_takes_the_step_before_the_stop() -> None:
    run = Policies(SOON)
    run.leave("policy-1")
    run.tell(StopRequested(reason="ctrl-c"))
    run.wait_alive(50, ["policy-0"])
    run.join("policy-1")
    run.wait_alive(50, ["policy-0", "policy-1"])
    assert run.steps_told("policy-0") == []
    run.finish("policy-0")
    run.finish("policy-1")
    assert run.steps_told("policy-0") == [1]


def test_policies_that_disagree_over_a_step_are_waited_for_no_longer_than_others() -> None:
    run = Policies(THREE)
    run.train("policy-0", "policy-1", "policy-2", step=0)
    run.train(step=1)
    run.leave("policy-2")
    run.join("policy-2", version=0)
    idle(run)
    run.wait(205)
    assert "policy replicas to agree on version 1: " in run.stopping
    assert run.steps_told("policy-0") == run.steps_told("policy-2") == [0]


def idle(run: Run) -> None:
    """Have the rollout answer for all that it holds, as where staleness allows no more."""
    for _ in range(100):
        if not run.asked:
            return
        run.answer(0.0, 1.0)
    raise AssertionError("it is given more and more")


# ---------------------------------------------------------------- a step that kills


def die(run: Policies, *, version: int) -> None:
    run.leave("policy-0")
    run.join("policy-0", version=version, lineage=len(run.controller.state.line))


def deadly(attempts: int, num_policies: int = 1) -> Policies:
    limits = replace(SHORT, step_attempts=attempts)
    return Policies(replace(CONFIG, num_policies=num_policies, endurance=limits))


def test_a_step_that_kills_its_policy_each_time_ends_the_run() -> None:
    run = deadly(3)
    for _ in range(2):
        die(run, version=0)
        assert run.stopping == ""
    run.restart()
    run.leave("policy-0")
    assert run.controller.finished == (
        f"{DEADLY} step 1: 3 attempts in a row at it, or at steps before it, ended with a death, "
        "the last with that of policy-0: killed"
    )


def test_replicas_that_die_together_have_tried_once() -> None:
    run = deadly(2, num_policies=2)
    for name in ("policy-0", "policy-1"):
        run.leave(name)
    for name in ("policy-0", "policy-1"):
        run.join(name)
    assert run.stopping == ""
    run.leave("policy-0")
    assert run.stopping.startswith(DEADLY)
    assert run.steps_told("policy-1") == [0]


def test_a_step_taken_beyond_the_deadly_one_begins_the_count_anew() -> None:
    run = deadly(2)
    for step in range(3):
        die(run, version=step)
        assert run.stopping == ""
        run.finish("policy-0", step)
        if step < 2:
            run.train(step=step + 1)
    assert run.stopping == "all steps done"


def test_a_policy_that_is_asked_to_end_has_not_died_of_its_step() -> None:
    run = deadly(1)
    run.tell(ReplicaLeft(replica="policy-0", reason="stopped"))
    assert run.stopping == ""


def test_a_policy_that_dies_between_steps_has_not_died_of_one() -> None:
    run = deadly(1)
    run.train("policy-0", step=0)
    die(run, version=1)
    assert run.stopping == ""
