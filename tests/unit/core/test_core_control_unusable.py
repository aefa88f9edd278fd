"""Prompts that nobody can sample: dropped and counted, and the end of a run that has no others."""

import pytest

from cosmos_core.control import UNUSABLE, Controller, ControllerConfig, StalenessConfig
from cosmos_core.messages import (
    CheckpointSaved,
    Generate,
    GroupFailed,
    GroupFinished,
    ReplicaJoined,
    SampleRef,
    Stop,
    VersionPublished,
)

REASON = "TokenRangeError: request train.0.7.0.0: prompt token 300 is outside 0..255; prompt 'a'"


class Run:
    """A controller, a policy, and a rollout replica that samples what it can."""

    def __init__(self, *, slots: int = 4, depth: int = 2) -> None:
        self.controller = Controller(
            ControllerConfig(
                num_steps=1000,
                groups_per_step=8,
                samples_per_group=1,
                min_group_samples=1,
                staleness=StalenessConfig(depth=depth, bound=4),
            )
        )
        self.now = 0.0
        self.asked: list[Generate] = []
        self.stops: list[tuple[str, Stop]] = []
        self.tell(ReplicaJoined(replica="policy-0", role="policy", endpoints=("here",)))
        self.tell(VersionPublished(replica="policy-0", version=0))
        self.tell(ReplicaJoined(replica="rollout-0", role="rollout", slots=slots))

    def tell(self, event) -> None:
        self.now += 0.001
        for name, command in self.controller.handle(event, self.now):
            if isinstance(command, Generate):
                self.asked.append(command)
            elif isinstance(command, Stop):
                self.stops.append((name, command))

    def refuse(self, command: Generate) -> None:
        self.tell(
            GroupFailed(
                replica="rollout-0",
                group=command.group,
                attempt=command.attempt,
                reason=REASON,
                drop_as="prompt not of this vocabulary",
            )
        )

    def answer(self, command: Generate) -> None:
        sample = SampleRef(sibling=0, status="completed", key=str(command.group), num_tokens=1)
        self.tell(
            GroupFinished(
                replica="rollout-0",
                group=command.group,
                attempt=command.attempt,
                samples=(sample,),
            )
        )


def test_a_run_of_which_no_prompt_can_be_sampled_ends_within_a_second_and_says_why() -> None:
    run = Run()
    while run.asked and not run.controller.state.stopping:
        run.refuse(run.asked.pop(0))
    stopping = run.controller.state.stopping
    assert stopping.startswith(f"{UNUSABLE}: 100 in a row were dropped")
    assert "'prompt not of this vocabulary'" in stopping
    assert REASON in stopping
    assert run.now < 1.0, "replicas do not rest because of prompts"
    assert run.controller.books().dropped == {"prompt not of this vocabulary": 100}
    assert {name for name, _ in run.stops} == {"policy-0", "rollout-0"}
    run.tell(CheckpointSaved(replica="policy-0", step=-1, path=""))
    assert run.controller.finished == stopping
    run.controller.books().check()


@pytest.mark.parametrize("slots", [1, 64])
def test_a_run_goes_on_as_long_as_a_tenth_of_its_prompts_can_be_sampled(slots: int) -> None:
    """Those that can take longer than all that are dropped meanwhile."""
    run = Run(slots=slots, depth=4)
    in_work: list[Generate] = []
    while run.controller.state.training is None:
        if not run.asked:
            run.answer(in_work.pop(0))
            continue
        command = run.asked.pop(0)
        if command.group.ordinal % 10 == 9:
            in_work.append(command)
        else:
            run.refuse(command)
    assert run.controller.state.stopping == ""
    assert run.controller.state.training is not None
    assert run.controller.books().dropped["prompt not of this vocabulary"] >= 72


def test_the_count_begins_anew_with_every_prompt_that_is_sampled_and_outlives_a_restart() -> None:
    run = Run(slots=1)
    for _ in range(99):
        run.refuse(run.asked.pop(0))
    run.answer(run.asked.pop(0))
    assert run.controller.state.unusable_in_a_row == 0
    for _ in range(99):
        run.refuse(run.asked.pop(0))
    restored = Controller.restore(run.controller.config, run.controller.snapshot())
    run.controller = restored
    assert restored.state.stopping == ""
    run.refuse(run.asked.pop(0))
    assert restored.state.stopping.startswith(UNUSABLE)
