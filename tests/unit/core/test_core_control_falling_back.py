"""Policy replicas that always are the same and die: what is done again, and what a stop saves."""

import pytest

from cosmos_core.control import ALL_DONE, Controller, ControllerConfig, StalenessConfig
from cosmos_core.control.ending import LOST
from cosmos_core.messages import (
    CheckpointSaved,
    Command,
    Event,
    Generate,
    GroupFinished,
    LoadFailed,
    LoadVersion,
    ReplicaJoined,
    ReplicaLeft,
    SampleRef,
    StepFinished,
    Stop,
    StopRequested,
    Tick,
    Train,
    VersionLoaded,
    VersionPublished,
)


class Run:
    """A controller, policy replicas that do what is ordered by hand, and one rollout replica."""

    def __init__(
        self, *, num_policies: int, num_steps: int = 4, slots: int = 1, checkpoint_every: int = 0
    ) -> None:
        self.config = ControllerConfig(
            num_steps=num_steps,
            groups_per_step=1,
            samples_per_group=2,
            num_policies=num_policies,
            checkpoint_every=checkpoint_every,
            staleness=StalenessConfig(depth=1, bound=2, policy="count"),
        )
        self.controller = Controller(self.config)
        self.policies = [f"policy-{i}" for i in range(num_policies)]
        self.orders: list[tuple[str, Command]] = []
        self.version = 0
        self.tell(ReplicaJoined(replica="rollout-0", role="rollout", slots=slots))

    def tell(self, event: Event) -> None:
        self.orders += self.controller.handle(event, 0.0)

    def tick(self, now: float) -> None:
        self.orders += self.controller.handle(Tick(), now)

    def take(self, kind: type[Command]) -> list[tuple[str, Command]]:
        """Return the orders of a kind since the last call for it."""
        found = [order for order in self.orders if isinstance(order[1], kind)]
        self.orders = [order for order in self.orders if not isinstance(order[1], kind)]
        return found

    def join(self, *names: str, version: int) -> None:
        for name in names or self.policies:
            self.tell(
                ReplicaJoined(replica=name, role="policy", version=version, endpoints=(name,))
            )

    def leave(self) -> None:
        for name in self.policies:
            self.tell(ReplicaLeft(replica=name, reason="killed"))

    def sample(self, version: int) -> None:
        """Answer the oldest prompt with tokens of a version."""
        generate = next(c for _, c in self.orders if isinstance(c, Generate))
        self.orders.remove(("rollout-0", generate))
        samples = tuple(
            SampleRef(
                sibling=sibling,
                status="completed",
                key=f"{generate.group}/{generate.attempt}/{sibling}",
                num_tokens=1,
                reward=float(sibling),
                oldest_version=version,
                newest_version=version,
            )
            for sibling in range(2)
        )
        self.tell(
            GroupFinished(
                replica="rollout-0",
                group=generate.group,
                attempt=generate.attempt,
                samples=samples,
            )
        )

    def finish(self, step: int) -> None:
        lineage = len(self.controller.state.line)
        for name in self.policies:
            self.tell(StepFinished(replica=name, step=step, lineage=lineage))
            self.tell(VersionPublished(replica=name, version=step + 1, lineage=lineage))

    def loaded(self, version: int, lineage: int = 0) -> None:
        loaded = VersionLoaded(
            replica="rollout-0", version=version, transfer_s=0.0, stall_s=0.0, lineage=lineage
        )
        self.tell(loaded)


def test_a_step_in_hand_is_given_to_all_who_come_back_for_it() -> None:
    """The first ones have to wait for the others, and are told with the last."""
    run = Run(num_policies=3)
    run.join(version=0)
    run.sample(0)
    assert [name for name, _ in run.take(Train)] == run.policies
    run.leave()
    run.join("policy-2", "policy-0", version=0)
    assert run.take(Train) == []
    run.join("policy-1", version=0)
    again = run.take(Train)
    assert sorted(name for name, _ in again) == run.policies
    assert len({order for _, order in again}) == 1
    run.finish(0)
    assert run.controller.books().consumed == 1


def stopped_run() -> Run:
    """A run of three steps that was asked to stop; its last checkpoint is one of version 1."""
    run = Run(num_policies=1)
    run.join(version=0)
    for step in range(3):
        run.sample(0)
        run.finish(step)
        if step == 0:
            run.tell(CheckpointSaved(replica="policy-0", step=0, path="x"))
    run.tell(StopRequested(reason="ctrl-c"))
    return run


def cut_of(order: Command) -> Controller:
    assert isinstance(order, Stop)
    return Controller.from_cut(Run(num_policies=1).config, order.cut)


def test_a_policy_that_dies_before_its_last_checkpoint_is_given_a_cut_of_what_it_holds() -> None:
    """With the cut of version 3 beside the weights of version 1 two steps would be lost."""
    run = stopped_run()
    assert [cut_of(order).state.step for name, order in run.take(Stop) if "policy" in name] == [3]
    run.orders.clear()
    run.controller = Controller.restore(run.config, run.controller.snapshot())
    run.join("policy-0", version=1)  # the same name again, before anybody missed it
    (order,) = (order for name, order in run.take(Stop) if name == "policy-0")
    resumed = cut_of(order)
    assert (resumed.state.step, resumed.books().consumed) == (1, 1)
    run.tell(CheckpointSaved(replica="policy-0", step=0, path="x"))
    assert run.controller.finished == f"ctrl-c; {LOST}"
    assert run.controller.books().consumed == 1


def test_policies_that_are_back_with_older_weights_when_a_stop_is_asked_for_save_those() -> None:
    run = Run(num_policies=2)
    run.join(version=0)
    run.sample(0)
    run.finish(0)
    run.leave()
    run.join("policy-0", version=0)  # the other one is on its way
    run.tell(StopRequested(reason="ctrl-c"))
    (order,) = (order for name, order in run.take(Stop) if name == "policy-0")
    assert cut_of(order).state.step == 0
    run.join("policy-1", version=0)
    for name in run.policies:
        run.tell(CheckpointSaved(replica=name, step=-1, path=""))
    assert run.controller.finished == f"ctrl-c; {LOST}"


def test_a_stopped_run_whose_policy_comes_back_with_older_weights_says_that_steps_are_undone() -> (
    None
):
    run = stopped_run()
    for _ in range(2):  # it dies again meanwhile
        run.join(version=1)
    run.tell(CheckpointSaved(replica="policy-0", step=0, path="x", lineage=1))
    assert run.controller.finished == f"ctrl-c; {LOST}"


@pytest.mark.parametrize("checkpoint_every", [0, 1])
def test_last_weights_that_a_checkpoint_of_the_last_step_holds_are_not_lost(
    checkpoint_every: int,
) -> None:
    """Who comes back loads and exports them, although the run has ended."""
    run = Run(num_policies=1, num_steps=1, checkpoint_every=checkpoint_every)
    run.join(version=0)
    run.sample(0)
    ((_, train),) = run.take(Train)
    run.finish(0)
    if train.cut:
        run.tell(CheckpointSaved(replica="policy-0", step=0, path="x"))
    run.leave()
    assert run.controller.finished == (ALL_DONE if checkpoint_every else LOST)


def test_a_run_whose_last_weights_die_unsaved_does_not_say_that_it_is_done() -> None:
    def at_its_end() -> Run:
        run = Run(num_policies=1, num_steps=1)
        run.join(version=0)
        run.sample(0)
        run.finish(0)
        assert run.controller.state.stopping == ALL_DONE
        return run

    run = at_its_end()
    run.leave()  # as its launcher says
    assert run.controller.finished == LOST
    run = at_its_end()
    run.join(version=0)  # it is back first
    run.tell(CheckpointSaved(replica="policy-0", step=-1, path=""))
    assert run.controller.finished == LOST
    run = at_its_end()
    run.tell(CheckpointSaved(replica="policy-0", step=0, path="x"))
    assert run.controller.finished == ALL_DONE


def test_prompts_that_are_issued_again_are_given_out_no_further_ahead_than_others() -> None:
    run = Run(num_policies=1, num_steps=9, slots=8)
    run.join(version=0)
    for step in range(5):
        run.sample(0)
        run.finish(step)
    run.leave()
    run.take(Generate)
    run.join(version=0)
    run.loaded(0, lineage=1)
    depth = run.config.staleness.depth
    assert len(run.take(Generate)) == depth + 1
    assert run.controller.books().in_flight["waiting"] == 5


def test_nobody_samples_with_weights_that_are_lost_while_they_arrive() -> None:
    """They may be there before the controller hears of it."""
    run = Run(num_policies=1, slots=4)
    run.join(version=0)
    run.sample(0)
    run.finish(0)
    assert [order.version for _, order in run.take(LoadVersion)] == [1]
    run.take(Generate)
    run.leave()
    run.join(version=0)
    assert run.take(Generate) == []
    run.loaded(1)
    assert [order.version for _, order in run.take(LoadVersion)] == [0]
    run.loaded(0)
    assert run.take(Generate)


def test_samples_of_weights_that_nobody_has_are_taken_again() -> None:
    """Of a replica that was taken for dead while it loaded weights, which have died meanwhile."""
    run = Run(num_policies=1)
    run.join(version=0)
    run.sample(1)
    assert run.take(Train) == []
    run.sample(0)
    assert len(run.take(Train)) == 1


def test_an_answer_that_comes_twice_does_not_pass_for_lost_weights() -> None:
    run = Run(num_policies=1)
    run.join(version=0)
    for step in range(3):
        run.sample(0)
        run.finish(step)
    run.leave()
    run.join(version=0)
    run.loaded(1)  # void: it was on its way
    run.loaded(3)  # of the same lost weights, sent again after a broken connection
    assert run.controller.state.replicas["rollout-0"].version == -1


def test_newer_weights_than_were_ordered_are_unknown_ones_after_a_fall_back() -> None:
    """They are not taken for what they say, nor for those before: these it has no more."""
    run = Run(num_policies=1, slots=4)
    run.join(version=0)
    for step in range(3):
        run.sample(0)
        run.finish(step)
    run.leave()
    run.join(version=0)
    run.loaded(1)
    run.loaded(0)
    run.sample(0)
    run.finish(0)  # one of a new line, to be loaded
    assert [order.version for _, order in run.take(LoadVersion)][-1] == 1
    run.tell(VersionPublished(replica="policy-0", version=2, lineage=1))
    run.loaded(2, lineage=1)  # newer than ordered: whose, the number does not say
    run.tell(LoadFailed(replica="rollout-0", version=2, reason="gone", lineage=1))
    run.take(Generate)
    run.take(LoadVersion)
    run.leave()
    run.join(version=0)
    run.tick(2.0)
    assert run.take(Generate) == [], "it samples with weights that are lost"
    assert [order.version for _, order in run.take(LoadVersion)] == [0]


def test_who_writes_no_checkpoint_does_not_pass_for_one_that_did() -> None:
    """Of several replicas one writes; it died, and the others said at once that they are done."""
    run = Run(num_policies=2, num_steps=1)
    run.join(version=0)
    run.sample(0)
    run.finish(0)
    run.tell(CheckpointSaved(replica="policy-1", step=0, path=""))
    run.tell(ReplicaLeft(replica="policy-0", reason="disk full"))
    assert run.controller.finished == LOST


def test_a_stop_whose_checkpoint_was_not_saved_says_so() -> None:
    run = stopped_run()
    run.leave()
    assert run.controller.finished == f"ctrl-c; {LOST}"
