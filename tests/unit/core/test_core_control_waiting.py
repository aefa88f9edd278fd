"""Whom and what a run that stands still waits for: every such state names what is missing.

Each state is come to by what replicas say and by what they leave out; nothing is set by hand.
"""

from collections.abc import Callable
from typing import Any

import pytest
from control_answers import answered

from cosmos_core.control import Controller, ControllerConfig, StalenessConfig, ValidationPlan
from cosmos_core.messages import (
    CheckpointSaved,
    Event,
    Generate,
    GroupFailed,
    LoadFailed,
    Progress,
    ReplicaJoined,
    ReplicaLeft,
    ScaleRequested,
    StepFinished,
    StopRequested,
    Tick,
    VersionLoaded,
    VersionPublished,
)

VALIDATED = ValidationPlan(num_prompts=2)


class Run:
    """A controller without anybody; groups of two samples, one a step."""

    def __init__(self, *, depth: int = 0, **settings: Any) -> None:
        fields: dict[str, Any] = {
            "num_steps": 9,
            "groups_per_step": 1,
            "samples_per_group": 2,
            "staleness": StalenessConfig(depth=depth, bound=depth),
            "lease_s": 10.0,
            "first_lease_s": 20.0,
        }
        self.controller = Controller(ControllerConfig(**{**fields, **settings}))
        self.given: dict[str, list[Generate]] = {}

    def tell(self, event: Event, now: float = 0.0) -> None:
        for name, command in self.controller.handle(event, now):
            if isinstance(command, Generate):
                self.given.setdefault(name, []).append(command)

    def policy(self, name: str = "p", version: int = 0) -> None:
        self.tell(ReplicaJoined(replica=name, role="policy", version=version, endpoints=(name,)))

    def rollout(self, name: str = "r", version: int = 0) -> None:
        self.tell(ReplicaJoined(replica=name, role="rollout", slots=1, version=version))

    def answer(self, name: str = "r") -> None:
        """Answer what a rollout was given first, all of its tokens of the weights it holds."""
        order = self.given[name].pop(0)
        version = self.controller.state.replicas[name].version
        self.tell(answered(name, order, version))

    def fail(self, name: str, reason: str) -> None:
        order = self.given[name].pop(0)
        self.tell(
            GroupFailed(replica=name, group=order.group, attempt=order.attempt, reason=reason)
        )

    def finish(self, step: int, *names: str) -> None:
        for name in names or ("p",):
            self.tell(StepFinished(replica=name, step=step))

    def publish(self, version: int) -> None:
        self.tell(VersionPublished(replica="p", version=version))


def together(**settings: Any) -> Run:
    """A policy replica p and a rollout replica r, with a group given out."""
    run = Run(**settings)
    run.policy()
    run.rollout()
    return run


# ---------------------------------------------------------------- policy replicas


def nobody() -> Run:
    return Run()


def one_of_two_policies() -> Run:
    run = Run(num_policies=2)
    run.policy("p")
    run.rollout()
    return run


def a_silent_policy() -> Run:
    run = together()
    run.tell(Progress(replica="r", count=1), 19.0)
    run.tell(Tick(), 24.0)
    return run


def two_policies_of_different_versions() -> Run:
    run = Run(num_policies=2)
    run.policy("p", version=1)
    run.policy("q", version=0)
    run.rollout()
    return run


def two_policies_in_a_step() -> Run:
    run = Run(num_policies=2)
    run.policy("p")
    run.policy("q")
    run.rollout()
    run.answer()
    return run


def two_policies_of_different_versions_in_a_step() -> Run:
    """One has taken the step in hand; the other is back with weights from long before it."""
    run = two_policies_in_a_step()
    run.finish(0, "p", "q")
    run.publish(1)
    run.tell(VersionLoaded(replica="r", version=1, transfer_s=0.0, stall_s=0.0))
    run.answer()
    run.finish(1, "p")
    run.policy("q", version=0)
    return run


def a_policy_back_behind_what_was_saved() -> Run:
    run = together()
    run.answer()
    run.finish(0)
    run.tell(CheckpointSaved(replica="p", step=0, path="somewhere"))
    run.policy("p", version=0)
    return run


def policies_that_come_and_go_with_lost_weights() -> Run:
    run = Run(num_policies=2, min_policies=1)
    run.policy("p")
    run.rollout()
    run.answer()
    run.finish(0)
    run.policy("p", version=0)  # alone again with older weights: the run falls back
    run.tell(StepFinished(replica="p", step=0, lineage=1))
    run.policy("p", version=1)
    return run


def a_step() -> Run:
    run = together()
    run.answer()
    return run


def a_step_that_one_of_two_has_taken() -> Run:
    run = two_policies_in_a_step()
    run.finish(0, "p")
    return run


# ---------------------------------------------------------------- rollout replicas


def no_rollout() -> Run:
    run = Run()
    run.policy()
    return run


def no_rollout_but_one_that_was_told_to_leave() -> Run:
    run = Run()
    run.policy()
    run.rollout("r")
    run.rollout("s")
    run.tell(ScaleRequested(rollouts=1))
    run.tell(ReplicaLeft(replica="r", reason="signal 9 (SIGKILL)"))
    return run


def no_rollout_is_wanted() -> Run:
    run = together()
    run.answer()
    run.tell(ScaleRequested(rollouts=0))
    run.finish(0)
    return run


def only_failing_rollouts() -> Run:
    run = together()
    for _ in range(3):
        run.fail("r", "no memory")
    return run


def a_failing_rollout_beside_one_that_leaves() -> Run:
    run = Run()
    run.policy()
    run.rollout("r")
    run.rollout("s")
    run.tell(ScaleRequested(rollouts=1))
    for _ in range(3):
        run.fail("r", "no memory")
    return run


def a_group() -> Run:
    return together()


# ---------------------------------------------------------------- weights


def weights_to_load() -> Run:
    run = together()
    run.answer()
    run.finish(0)
    run.publish(1)
    return run


def weights_that_cannot_be_loaded() -> Run:
    run = weights_to_load()
    for second in range(1, 4):
        failed = LoadFailed(replica="r", version=1, reason="refused")
        run.tell(failed, float(second))
        run.tell(Tick(), second + 1.0)
    return run


def weights_that_nobody_publishes() -> Run:
    run = together()
    run.answer()
    run.finish(0)
    return run


def weights_that_nobody_serves() -> Run:
    run = Run()
    run.tell(ReplicaJoined(replica="p", role="policy", version=1))
    run.rollout("r", version=0)
    return run


# ---------------------------------------------------------------- validations, and the end


def a_validation() -> Run:
    return together(validation=VALIDATED)


def a_validation_that_waits_for_a_group() -> Run:
    """The version is due when its only holder is still at a training group of the one before."""
    plan = ValidationPlan(num_prompts=2, before=False, every=1)
    run = together(depth=1, validation=plan)
    run.answer()
    run.finish(0)
    run.publish(1)
    run.tell(VersionLoaded(replica="r", version=1, transfer_s=0.0, stall_s=0.0))
    return run


def the_last_weights_to_validate() -> Run:
    run = together(num_steps=1, validation=ValidationPlan(num_prompts=2, before=False))
    run.answer()
    run.finish(0)
    return run


def the_last_checkpoint() -> Run:
    run = together()
    run.tell(StopRequested(reason="ctrl-c"))
    return run


def a_step_after_which_it_stops() -> Run:
    run = a_step()
    run.tell(StopRequested(reason="ctrl-c"))
    return run


def the_end() -> Run:
    run = the_last_checkpoint()
    run.tell(CheckpointSaved(replica="p", step=-1, path=""))
    return run


@pytest.mark.parametrize(
    ("standing", "words"),
    [
        (nobody, "1 of 1 policy replicas to join"),
        (one_of_two_policies, "1 of 2 policy replicas to join beside p"),
        (
            a_silent_policy,
            "1 of 1 policy replicas to join; p lost its lease 6.0 s ago, without progress",
        ),
        (
            two_policies_of_different_versions,
            "policy replicas to agree on version 0: p at version 1, q at version 0",
        ),
        (
            two_policies_of_different_versions_in_a_step,
            "policy replicas to agree on version 1: p at version 2, q at version 0",
        ),
        (
            a_policy_back_behind_what_was_saved,
            "policy replicas to agree on version 1: p at version 0",
        ),
        (
            policies_that_come_and_go_with_lost_weights,
            "policy replicas to agree on version 1: p at weights that the run fell back from",
        ),
        (a_step, "step 1 on p for 30.0 s"),
        (a_step_that_one_of_two_has_taken, "step 1 on q for 30.0 s"),
        (no_rollout, "a rollout replica to join"),
        (no_rollout_but_one_that_was_told_to_leave, "a rollout replica to join"),
        (
            no_rollout_is_wanted,
            "somebody to want a rollout replica again, by 'cosmos-app scale'",
        ),
        (
            only_failing_rollouts,
            "rollout replicas that do not fail: r, tried again in 0.0 s, said no memory",
        ),
        (
            a_failing_rollout_beside_one_that_leaves,
            "rollout replicas that do not fail: r, tried again in 0.0 s, said no memory",
        ),
        (a_group, "group train.0.0 on r for 30.0 s"),
        (weights_to_load, "version 1 to load on r"),
        (
            weights_that_cannot_be_loaded,
            "version 1 to load on r; r could not, 3 times: refused",
        ),
        (weights_that_nobody_publishes, "version 1 to be published by p"),
        (
            weights_that_nobody_serves,
            "endpoints of version 1: the policy replicas that have it joined with none",
        ),
        (a_validation, "2 validation answers of version 0 on r for 30.0 s"),
        (
            a_validation_that_waits_for_a_group,
            "2 validation answers of version 1 on no replica yet for 30.0 s; "
            "before them group train.0.1 on r for 30.0 s",
        ),
        (the_last_weights_to_validate, "version 1 to be published by p"),
        (a_step_after_which_it_stops, "step 1 on p for 30.0 s"),
        (the_last_checkpoint, "the last checkpoint of p"),
        (the_end, "nothing: ctrl-c"),
    ],
)
def test_a_run_that_stands_still_names_what_is_missing(
    standing: Callable[[], Run], words: str
) -> None:
    assert standing().controller.waiting_for(30.0) == words
