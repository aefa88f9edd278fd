"""Versions that a policy has and does not publish: nobody is told to load them, and all is said."""

from typing import Any

import pytest

from cosmos_core.control import Controller, ControllerConfig, StalenessConfig
from cosmos_core.control.served import ServedTimes
from cosmos_core.messages import (
    Command,
    Event,
    GroupFinished,
    LoadVersion,
    PublicationSkipped,
    ReplicaJoined,
    SampleRef,
    StepFinished,
    VersionLoaded,
    VersionPublished,
)

READERS = "rank 0: version 1 by receiver at 10.0.0.3"
SKIPPED = PublicationSkipped(replica="p", version=2, stall_s=0.001, held_by=READERS)


class Run:
    """A policy p and a rollout r; steps of one group, which r answers at once."""

    def __init__(self, **settings: Any) -> None:
        fields: dict[str, Any] = {
            "num_steps": 9,
            "groups_per_step": 1,
            "samples_per_group": 1,
            "staleness": StalenessConfig(depth=2, bound=4),
        }
        self.controller = Controller(ControllerConfig(**{**fields, **settings}))
        self.tell(ReplicaJoined(replica="p", role="policy", endpoints=("p",)))
        self.tell(ReplicaJoined(replica="r", role="rollout", slots=1))

    def tell(self, event: Event) -> list[Command]:
        return [command for _, command in self.controller.handle(event, 0.0)]

    def step(self) -> None:
        """Take the next step: its weights are held, and nothing is said of their publication."""
        state = self.controller.state
        (group,) = (g for g in state.groups.values() if g.stage == "generating")
        version = state.replicas["r"].version
        sample = SampleRef(
            sibling=0, status="completed", key=str(group.group), num_tokens=1,
            oldest_version=version, newest_version=version,
        )  # fmt: skip
        attempt = group.attempt
        self.tell(GroupFinished(replica="r", group=group.group, attempt=attempt, samples=(sample,)))
        self.tell(StepFinished(replica="p", step=state.step))

    @property
    def policy(self) -> dict[str, Any]:
        return self.controller.status(0.0)["replicas"]["p"]


@pytest.fixture
def run() -> Run:
    """Version 1 is published and on its way to r; version 2 was skipped."""
    made = Run()
    made.step()
    made.tell(VersionPublished(replica="p", version=1))
    made.step()
    made.tell(SKIPPED)
    return made


def test_a_skipped_version_is_ordered_by_nobody_until_it_is_published(run: Run) -> None:
    loaded = VersionLoaded(replica="r", version=1, transfer_s=9.0, stall_s=0.0)
    assert not [c for c in run.tell(loaded) if isinstance(c, LoadVersion)]
    assert run.controller.status(0.0)["published"] == 1
    orders = run.tell(VersionPublished(replica="p", version=2))
    assert [c.version for c in orders if isinstance(c, LoadVersion)] == [2]


def test_a_newer_version_is_published_instead(run: Run) -> None:
    run.step()
    run.tell(VersionPublished(replica="p", version=3))
    loaded = VersionLoaded(replica="r", version=1, transfer_s=9.0, stall_s=0.0)
    orders = run.tell(loaded)
    assert [c.version for c in orders if isinstance(c, LoadVersion)] == [3]
    assert (run.policy["skipped"], run.policy["held_by"]) == (1, "")


def test_it_is_counted_once_however_often_it_is_told(run: Run) -> None:
    run.tell(SKIPPED)
    assert run.policy["skipped"] == 1
    assert run.controller.state.counters.publications_skipped == 1
    run.tell(VersionPublished(replica="p", version=2))
    run.tell(SKIPPED)
    assert (run.policy["skipped"], run.policy["held_by"]) == (1, "")


def test_a_run_that_the_bound_holds_up_for_it_says_who_is_in_the_way() -> None:
    run = Run(staleness=StalenessConfig(depth=0, bound=0))
    run.step()
    held_by = "rank 0: version 0 by receiver at 10.0.0.3"
    run.tell(PublicationSkipped(replica="p", version=1, held_by=held_by))
    assert run.controller.waiting_for(0.0) == (
        f"version 1 to be published by p; p has no room to serve version 1: {held_by}"
    )
    run.tell(VersionPublished(replica="p", version=1))
    assert run.controller.waiting_for(0.0) == "version 1 to load on r"
    run.tell(VersionLoaded(replica="r", version=1, transfer_s=0.0, stall_s=0.0))
    assert run.controller.waiting_for(0.0).startswith("group train.0.1 on r")


def test_weights_that_are_on_their_way_are_waited_for_first_and_the_others_named() -> None:
    run = Run(staleness=StalenessConfig(depth=1, bound=1))
    run.step()
    run.tell(VersionPublished(replica="p", version=1))
    run.step()
    run.tell(SKIPPED)
    assert run.controller.waiting_for(0.0) == (
        f"version 1 to load on r; p has no room to serve version 2: {READERS}"
    )


def test_of_weights_that_the_run_fell_back_from_nothing_is_heard() -> None:
    run = Run()
    run.controller.state.line = (0,)
    run.tell(SKIPPED)
    assert run.policy["skipped"] == 0
    assert run.controller.state.counters.reports_lost == 1


def test_a_policy_that_joins_again_serves_what_it_says_and_not_what_it_holds(run: Run) -> None:
    again = ReplicaJoined(
        replica="p", role="policy", version=2, published=1, endpoints=("p",), incarnation="again"
    )
    run.tell(again)
    status = run.controller.status(0.0)
    assert (status["published"], status["replicas"]["p"]["version"]) == (1, 2)


def test_what_a_skipped_publication_cost_is_told_as_that_of_others_is() -> None:
    times = ServedTimes()
    times.note(SKIPPED, 1.0)
    assert times.last("p") == {"publish_ms": 1.0}
    loaded = VersionLoaded(replica="r", version=2, transfer_s=0.0, stall_s=0.0)
    assert times.note(loaded, 2.0) is None, "it was not published"
