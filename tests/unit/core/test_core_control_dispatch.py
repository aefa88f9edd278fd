"""Who is given prompts: not a replica that fails, and not only the first to have new weights."""

from collections import Counter

from cosmos_core.control import Controller, ControllerConfig, StalenessConfig
from cosmos_core.messages import (
    Command,
    Event,
    Generate,
    GroupFailed,
    GroupFinished,
    Progress,
    ReplicaJoined,
    ReplicaLeft,
    SampleRef,
    ScaleRequested,
    StepFinished,
    Stop,
    Tick,
    VersionLoaded,
    VersionPublished,
)


def controller(depth: int, bound: int, *, groups: int = 6, slots: int = 8) -> Controller:
    """A policy that serves version 0, and two rollout replicas that were told to load it."""
    made = Controller(
        ControllerConfig(
            num_steps=100_000,
            groups_per_step=groups,
            samples_per_group=1,
            min_group_samples=1,
            max_attempts=1000,
            staleness=StalenessConfig(depth=depth, bound=bound),
        )
    )
    policy = ReplicaJoined(replica="policy-0", role="policy", endpoints=("here",))
    made.handle(policy, 0.0)
    made.handle(VersionPublished(replica="policy-0", version=0), 0.0)
    for name in ("rollout-0", "rollout-1"):
        joined = ReplicaJoined(replica=name, role="rollout", slots=slots, version=-1)
        made.handle(joined, 0.0)
    return made


def given(made: Controller, event: Event, now: float) -> list[tuple[str, Generate]]:
    """Return the prompts given out after an event."""
    commands = made.handle(event, now)
    return [(name, command) for name, command in commands if isinstance(command, Generate)]


def loaded(name: str) -> VersionLoaded:
    return VersionLoaded(replica=name, version=0, transfer_s=0.1, stall_s=0.0)


def finished(name: str, command: Generate) -> GroupFinished:
    sample = SampleRef(sibling=0, status="completed", key=str(command.group), num_tokens=1)
    return GroupFinished(
        replica=name, group=command.group, attempt=command.attempt, samples=(sample,)
    )


def test_the_first_to_have_new_weights_is_given_its_share_and_the_next_the_rest() -> None:
    made = controller(0, 0)
    first = given(made, loaded("rollout-0"), 1.0)
    assert [name for name, _ in first] == ["rollout-0"] * 3
    assert [name for name, _ in given(made, loaded("rollout-1"), 1.1)] == ["rollout-1"] * 3


def test_a_replica_that_never_gets_the_weights_keeps_nobody_waiting() -> None:
    """What is left of a step is shared again and again: 3 of 6, 2 of 3, 1 of 1."""
    made = controller(0, 0)
    todo = given(made, loaded("rollout-0"), 1.0)
    rounds: list[int] = []
    while made.state.training is None:
        rounds.append(len(todo))
        todo = [g for _, each in todo for g in given(made, finished("rollout-0", each), 2.0)]
    assert sum(rounds) == 6
    assert rounds[0] == 3


def test_a_replica_whose_groups_keep_failing_rests_ever_longer_and_the_other_does_the_work() -> (
    None
):
    made = controller(2, 1000)
    waiting = [*given(made, loaded("rollout-0"), 0.0), *given(made, loaded("rollout-1"), 0.0)]
    asked: Counter[str] = Counter()
    for turn in range(1200):  # two minutes
        now = 0.1 * turn
        answered, waiting = waiting, given(made, Tick(), now)
        for name in made.state.replicas:
            made.handle(Progress(replica=name, count=turn), now)
        if made.state.training is not None:
            done = StepFinished(replica="policy-0", step=made.state.step)
            waiting.extend(given(made, done, now))
        for name, command in answered:
            asked[name] += 1
            event = (
                finished(name, command)
                if name == "rollout-1"
                else GroupFailed(
                    replica=name, group=command.group, attempt=command.attempt, reason="refused"
                )
            )
            waiting.extend(given(made, event, now))
    assert asked["rollout-1"] >= 6 * made.state.step >= 6 * 100, "the other one does the work"
    # eight at once, one for each of the first two that fail, then one after 0.5, 1, 2, ... 30, 30 s
    assert asked["rollout-0"] <= 8 + 2 + 8
    replica = made.status(120.0)["replicas"]["rollout-0"]
    assert replica["last_failure"] == "refused"
    assert replica["failures"] >= 6


def test_a_run_in_which_everybody_fails_says_so() -> None:
    made = controller(2, 4)
    orders = [*given(made, loaded("rollout-0"), 0.0), *given(made, loaded("rollout-1"), 0.0)]
    for name, command in orders:
        event = GroupFailed(
            replica=name, group=command.group, attempt=command.attempt, reason="no memory"
        )
        made.handle(event, 1.0)
    assert made.waiting_for(1.0) == (
        "rollout replicas that do not fail: rollout-0, tried again in 0.5 s, said no memory"
    )


def test_a_replica_all_of_whose_samples_fail_rests_and_says_why() -> None:
    made = controller(2, 4)
    for name, command in given(made, loaded("rollout-0"), 0.0):
        sample = SampleRef(sibling=0, status="failed", failure="engine: not finite: trajectory 3/0")
        event = GroupFinished(
            replica=name, group=command.group, attempt=command.attempt, samples=(sample,)
        )
        made.handle(event, 1.0)
    status = made.status(1.0)
    assert status["counters"]["failures"].keys() == {"engine: not finite"}
    replica = status["replicas"]["rollout-0"]
    assert replica["failures"] >= 2
    assert replica["last_failure"].startswith("engine: not finite")
    # the groups are sampled again: a step has none that is empty
    assert made.state.training is None
    assert {group.stage for group in made.state.groups.values()} <= {"waiting", "generating"}
    assert made.state.counters.retries > 0


def test_a_prompt_that_nobody_can_sample_is_dropped_under_its_reason_and_replaced() -> None:
    made = controller(2, 4)
    (name, command), *_ = given(made, loaded("rollout-0"), 0.0)
    event = GroupFailed(
        replica=name,
        group=command.group,
        attempt=command.attempt,
        reason="PromptTooLongError: it has 70 tokens",
        drop_as="prompt too long",
    )
    ((_, replacement),) = given(made, event, 1.0)
    assert replacement.group.ordinal > command.group.ordinal
    assert replacement.attempt == 0
    assert made.books().dropped == {"prompt too long": 1}
    assert made.state.counters.retries == 0
    assert made.status(1.0)["replicas"][name]["last_failure"] == event.reason


def test_one_group_that_comes_back_ends_the_distrust() -> None:
    made = controller(2, 4)
    orders = given(made, loaded("rollout-0"), 0.0)
    while orders:
        name, command = orders.pop(0)
        event = GroupFailed(
            replica=name, group=command.group, attempt=command.attempt, reason="busy"
        )
        orders.extend(given(made, event, 1.0))
    probe = given(made, Tick(), 1.6)
    assert len(probe) == 1
    assert len(given(made, finished(*probe[0]), 1.7)) == 8


def test_a_replica_beyond_the_wanted_number_finishes_its_groups_and_is_told_to_stop() -> None:
    made = controller(2, 4, groups=20)
    given(made, loaded("rollout-0"), 0.0)
    held = given(made, loaded("rollout-1"), 0.0)
    assert [name for name, _ in held] == ["rollout-1"] * 8
    assert made.handle(ScaleRequested(rollouts=1), 1.0) == []
    assert made.status(1.0)["replicas"]["rollout-1"]["leaving"]
    told: list[tuple[str, Command]] = []
    for each in held:
        told.extend(made.handle(finished(*each), 2.0))
    assert [(name, type(each)) for name, each in told] == [("rollout-1", Stop)]
    made.handle(ReplicaLeft(replica="rollout-1", reason="stopped"), 3.0)
    counters = made.status(3.0)["counters"]
    assert (counters["retries"], counters["replicas_lost"]) == (0, 0)


def test_one_that_was_leaving_stays_when_more_are_wanted_again() -> None:
    made = controller(2, 4)
    given(made, loaded("rollout-0"), 0.0)
    (first, *_) = given(made, loaded("rollout-1"), 0.0)
    made.handle(ScaleRequested(rollouts=1), 1.0)
    assert given(made, finished(*first), 1.0) == []
    assert {name for name, _ in given(made, ScaleRequested(rollouts=2), 1.0)} == {"rollout-1"}
