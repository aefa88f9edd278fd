"""Policy replicas that come and go: one step after the other, whoever is there."""

import pytest

from cosmos_core.control import ALL_DONE, Controller, ControllerConfig, StalenessConfig
from cosmos_core.messages import (
    CheckpointSaved,
    Command,
    Event,
    Generate,
    GroupFinished,
    LoadVersion,
    ReplicaJoined,
    ReplicaLeft,
    SampleRef,
    ScaleRequested,
    StepFinished,
    Stop,
    Train,
    VersionLoaded,
    VersionPublished,
)

NUM_STEPS = 4


class Run:
    """A controller, and a rollout replica that answers at once."""

    def __init__(self, *, min_policies: int = 1) -> None:
        self.controller = Controller(
            ControllerConfig(
                num_steps=NUM_STEPS,
                groups_per_step=1,
                samples_per_group=2,
                num_policies=2,
                min_policies=min_policies,
                staleness=StalenessConfig(depth=0, bound=0),
            )
        )
        self.orders: list[tuple[str, Command]] = []
        self.tell(ReplicaJoined(replica="rollout-0", role="rollout", slots=4))

    @property
    def step(self) -> int:
        return self.controller.state.step

    def tell(self, event: Event) -> None:
        for name, command in self.controller.handle(event, 0.0):
            match command:
                case Generate():
                    self.tell(self.answer(name, command))
                case LoadVersion(version=version):
                    loaded = VersionLoaded(
                        replica=name,
                        version=version,
                        transfer_s=0.0,
                        stall_s=0.0,
                        lineage=command.lineage,
                    )
                    self.tell(loaded)
                case _:
                    self.orders.append((name, command))

    def answer(self, name: str, command: Generate) -> GroupFinished:
        samples = tuple(
            SampleRef(
                sibling=sibling,
                status="completed",
                key=f"{command.group}/{command.attempt}/{sibling}",
                num_tokens=1,
                reward=float(sibling),
                oldest_version=self.step,
                newest_version=self.step,
            )
            for sibling in range(2)
        )
        return GroupFinished(
            replica=name, group=command.group, attempt=command.attempt, samples=samples
        )

    @property
    def lineage(self) -> int:
        return len(self.controller.state.line)

    def join(self, name: str, version: int = 0, lineage: int = 0) -> None:
        joined = ReplicaJoined(
            replica=name, role="policy", version=version, lineage=lineage, endpoints=(name,)
        )
        self.tell(joined)

    def finish(self, name: str, step: int) -> None:
        lineage = self.lineage
        self.tell(StepFinished(replica=name, step=step, lineage=lineage))
        self.tell(VersionPublished(replica=name, version=step + 1, lineage=lineage))

    def save(self, name: str, step: int) -> None:
        self.tell(CheckpointSaved(replica=name, step=step, path="x", lineage=self.lineage))

    def taken(self) -> list[tuple[str, int]]:
        """The steps ordered since the last call, with whom they were ordered from."""
        orders, self.orders = self.orders, []
        return [(name, order.step) for name, order in orders if isinstance(order, Train)]


def test_a_step_is_formed_for_whoever_is_there_and_committed_by_the_first_to_say_so() -> None:
    run = Run()
    run.join("policy-0")
    assert run.taken() == [("policy-0", 0)]
    run.join("policy-1")
    assert run.taken() == [("policy-1", 0)]  # it may still get into the step in hand
    run.finish("policy-1", 0)
    assert run.taken() == [("policy-0", 1), ("policy-1", 1)]
    run.finish("policy-0", 0)  # the other member, later
    assert run.taken() == []
    assert run.controller.state.counters.duplicates == 0
    assert {p.version for p in run.controller.state.policies()} == {1}


def test_the_others_go_on_when_one_dies_and_it_comes_back_to_the_step_in_hand() -> None:
    run = Run()
    run.join("policy-0")
    run.join("policy-1")
    run.finish("policy-0", 0)
    run.taken()
    run.tell(ReplicaLeft(replica="policy-0", reason="killed"))
    run.finish("policy-1", 1)
    assert run.taken() == [("policy-1", 2)]
    run.join("policy-0", version=0)  # with the weights of the beginning: a peer helps
    assert run.taken() == [("policy-0", 2)]
    assert run.step == 2
    run.tell(StepFinished(replica="policy-0", step=1))  # it has them
    run.finish("policy-0", 2)
    assert run.controller.books().consumed == 3
    assert run.controller.state.counters.steps_void == 0


@pytest.mark.parametrize("known", [1, 2])
def test_one_that_comes_back_does_not_take_steps_back_while_another_is_there(known: int) -> None:
    """Whether or not the controller has heard yet that the other got newer weights from a peer."""
    run = Run()
    run.join("policy-0")
    run.finish("policy-0", 0)
    run.finish("policy-0", 1)
    run.join("policy-1", version=known)
    run.tell(ReplicaLeft(replica="policy-0", reason="killed"))
    run.taken()
    run.join("policy-0", version=0)
    assert run.step == 2
    assert run.taken() == [("policy-0", 2)]


def test_a_replica_that_is_alone_with_older_weights_takes_the_run_back_to_them() -> None:
    run = Run()
    run.join("policy-0")
    for step in range(3):
        run.finish("policy-0", step)
    run.tell(CheckpointSaved(replica="policy-0", step=0, path="x"))
    run.tell(ReplicaLeft(replica="policy-0", reason="killed"))
    run.taken()
    run.join("policy-0", version=1)
    assert run.step == 1
    assert run.taken() == [("policy-0", 1)]
    assert run.controller.books().consumed == 1
    for step in range(1, NUM_STEPS):
        run.finish("policy-0", step)
    run.save("policy-0", NUM_STEPS - 1)
    assert run.controller.finished == ALL_DONE
    books = run.controller.books()
    assert (books.issued, books.consumed) == (NUM_STEPS, NUM_STEPS)


def test_replicas_that_are_all_back_with_older_weights_do_not_wait_for_newer_ones() -> None:
    """They died in turn, each while another was there, which had no newer weights either."""
    run = Run()
    run.join("policy-0")
    run.finish("policy-0", 0)
    run.tell(CheckpointSaved(replica="policy-0", step=0, path="x"))
    run.tell(ReplicaLeft(replica="rollout-0", reason="killed"))
    run.finish("policy-0", 1)  # no step is in hand now, in which they would meet
    run.join("policy-1", version=1)
    run.tell(ReplicaLeft(replica="policy-0", reason="killed"))
    run.join("policy-0", version=1)
    assert run.step == 1
    run.taken()
    run.tell(ReplicaJoined(replica="rollout-0", role="rollout", slots=4, version=1))
    assert run.taken() == [("policy-1", 1), ("policy-0", 1)]


def test_weights_that_are_ahead_of_the_books_are_gone_on_from() -> None:
    """A replica that was taken for dead has helped one that had begun again."""
    run = Run()
    run.join("policy-0")
    run.finish("policy-0", 1)  # as the other has it
    assert run.step == 2
    assert run.taken()[-1] == ("policy-0", 2)


def test_who_is_behind_leaves_before_who_has_the_weights() -> None:
    run = Run()
    for name in ("policy-0", "policy-1"):
        run.join(name)
    run.finish("policy-1", 0)
    run.tell(ScaleRequested(policies=1))
    assert [n for n, order in run.orders if isinstance(order, Stop)] == ["policy-0"]


def test_who_says_farewell_after_the_end_is_not_waited_for() -> None:
    run = Run()
    run.join("policy-0")
    for step in range(NUM_STEPS):
        run.finish("policy-0", step)
    run.tell(CheckpointSaved(replica="policy-0", step=NUM_STEPS - 1, path="x"))
    assert run.controller.finished
    assert set(run.controller.status(0.0)["replicas"]) == {"policy-0", "rollout-0"}
    run.tell(ReplicaLeft(replica="rollout-0", reason="stopped"))
    assert set(run.controller.status(0.0)["replicas"]) == {"policy-0"}
    assert run.controller.books().consumed == NUM_STEPS


def test_a_run_that_needs_two_waits_for_the_second() -> None:
    run = Run(min_policies=2)
    run.join("policy-0")
    assert run.taken() == []
    assert run.controller.waiting_for(0.0) == "1 of 2 policy replicas to join beside policy-0"
    run.join("policy-1")
    assert run.taken() == [("policy-0", 0), ("policy-1", 0)]


def test_policies_are_asked_to_leave_down_to_the_fewest_that_a_step_needs() -> None:
    run = Run()
    for name in ("policy-0", "policy-1"):
        run.join(name)
    run.tell(ScaleRequested(policies=0))
    assert run.controller.status(0.0)["wanted_policies"] == 1
    assert [n for n, order in run.orders if isinstance(order, Stop)] == ["policy-1"]
    run.finish("policy-1", 0)  # what it had in hand
    run.tell(ReplicaLeft(replica="policy-1", reason="stopped"))
    assert run.controller.state.counters.replicas_lost == 0
    run.finish("policy-0", 1)
    assert run.step == 2


def test_fixed_policies_are_not_scaled() -> None:
    run = Run(min_policies=0)
    run.tell(ScaleRequested(policies=1))
    assert run.controller.status(0.0)["wanted_policies"] == -1


def test_more_members_than_replicas_are_refused() -> None:
    with pytest.raises(ValueError, match="min_policies is 3 and num_policies 2"):
        Run(min_policies=3)
