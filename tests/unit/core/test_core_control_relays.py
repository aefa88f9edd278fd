"""A version that all rollouts want: it enters each machine once, and is passed on in chains."""

import random
from collections.abc import Mapping

import pytest
from weight_orders import Run, source_of

from cosmos_core.control.state import ReplicaState
from cosmos_core.messages import (
    LoadFailed,
    LoadVersion,
    Progress,
    ReplicaLeft,
    Tick,
    VersionPublished,
)


def test_a_version_goes_from_machine_to_machine_and_is_passed_on_inside_each():
    run = Run({"a": "m0", "b": "m1", "a2": "m0", "b2": "m1", "c": "m2", "b3": "m1"})
    assert run.sources(4) == {
        "a": "policy-0",
        "a2": "a",
        "b": "a",
        "b2": "b",
        "b3": "b",
        "c": "b",
    }


def test_names_do_not_matter_for_who_is_first():
    run = Run({"z": "m0", "y": "m1", "x": "m2"})
    assert run.sources(4) == {"z": "policy-0", "y": "z", "x": "y"}


def test_rollouts_of_the_policy_s_own_machine_fetch_from_the_policy_and_relay_nothing():
    run = Run({"near": "p", "nearer": "p", "a": "m0", "b": "m1"})
    assert run.sources(4) == {
        "near": "policy-0",
        "nearer": "policy-0",
        "a": "policy-0",
        "b": "a",
    }


@pytest.mark.parametrize(
    ("policy_ranks", "ranks", "chains"), [(1, 1, 1), (1, 4, 1), (4, 2, 2), (8, 2, 4), (7, 2, 3)]
)
def test_there_are_as_many_chains_as_the_policy_can_feed(policy_ranks, ranks, chains):
    names = [f"r{number}" for number in range(9)]
    run = Run({name: f"m{name}" for name in names}, policy_ranks=policy_ranks, ranks=ranks)
    expected = {
        name: "policy-0" if number < chains else names[number - chains]
        for number, name in enumerate(names)
    }
    assert run.sources(4) == expected


def test_only_policies_that_have_the_version_feed_chains():
    run = Run({f"r{i}": f"m{i}" for i in range(4)}, policies=("p", "q"))
    orders = run.tell(VersionPublished(replica="policy-0", version=4))
    assert [source_of(orders[f"r{i}"]) for i in range(4)] == ["policy-0", "r0", "r1", "r2"]


def test_all_policies_that_have_the_version_feed_chains():
    run = Run({f"r{i}": f"m{i}" for i in range(5)}, policies=("p", "q"))
    for name in [f"r{i}" for i in range(5)]:
        run.controller.state.replicas[name].retry_at_s = 1e9  # none follows before both have it
    run.publish(4)
    for name in [f"r{i}" for i in range(5)]:
        run.controller.state.replicas[name].retry_at_s = 0.0
    orders = run.tell(Tick())
    sources = [source_of(orders[f"r{i}"]) for i in range(5)]
    assert sources == ["policy-0", "policy-1", "r0", "r1", "r2"]


def test_who_serves_nothing_is_passed_over():
    run = Run({"a": "m0", "b": "m1", "c": "m2"})
    run.publish(4)
    for name in "abc":
        run.loaded(name, 4, serves=name != "b")
    assert run.sources(5) == {"a": "policy-0", "b": "a", "c": "a"}


def test_who_may_hang_is_passed_over():
    run = Run({"a": "m0", "b": "m1", "c": "m2"})
    run.now += 8.0
    for name in "ac":
        run.tell(Progress(replica=name, count=1))
    assert run.sources(4) == {"a": "policy-0", "b": "a", "c": "a"}


def test_who_still_loads_an_older_version_is_passed_over_and_follows_later():
    run = Run({"a": "m0", "b": "m1", "c": "m2"})
    run.publish(4)
    run.loaded("a", 4)
    run.loaded("c", 4)
    assert run.sources(5) == {"a": "policy-0", "c": "a"}
    assert {n: source_of(order) for n, order in run.loaded("b", 4).items()} == {"b": "a"}


def test_a_load_from_a_relay_that_failed_is_made_up_for_by_the_policy_and_the_next_is_not():
    run = Run({"a": "m0", "b": "m1"})
    assert run.sources(4)["b"] == "a"
    run.tell(LoadFailed(replica="b", version=4, reason="it was killed"))
    run.now += 5.0
    assert source_of(run.tell(Tick())["b"]) == "policy-0"
    run.loaded("b", 4)
    run.loaded("a", 4)
    assert run.sources(5)["b"] == "a"


def test_nobody_is_sent_to_who_failed_to_load_the_version():
    run = Run({"a": "m0", "b": "m1"})
    run.sources(4)
    run.loaded("b", 4)
    run.tell(LoadFailed(replica="a", version=4, reason="no memory"))
    assert run.sources(5) == {"b": "policy-0"}
    run.now += 5.0
    assert source_of(run.tell(Tick())["a"]) == "policy-0"


def test_a_chain_closes_where_a_member_has_left():
    run = Run({"a": "m0", "b": "m1", "c": "m2"})
    run.tell(ReplicaLeft(replica="b", reason="killed"))
    assert run.sources(4) == {"a": "policy-0", "c": "a"}
    run.join("b", "m1")
    run.loaded("b", 4)
    run.loaded("a", 4)
    run.loaded("c", 4)
    assert run.sources(5) == {"a": "policy-0", "c": "a", "b": "c"}


def test_loads_from_relays_are_counted():
    run = Run({"a": "m0", "b": "m1"})
    before = run.controller.state.counters.loads_from_rollouts
    run.publish(4)
    for name in "ab":
        run.loaded(name, 4)
    assert run.controller.state.counters.loads_from_rollouts == before + 1


@pytest.mark.parametrize("seed", range(20))
def test_nobody_waits_for_somebody_who_waits_for_it(seed):
    """Whoever is waited for is being sent the version, has it, or will be told to load it again."""
    chance = random.Random(seed)
    run = Run({f"r{i}": f"m{i % 5}" for i in range(12)})
    replicas = run.controller.state.replicas
    version, waits_for = 3, dict[str, ReplicaState]()
    for _ in range(300):
        name = chance.choice(sorted(replicas))
        replica = replicas[name]
        given: dict[str, LoadVersion] = {}
        match chance.randrange(5):
            case 0:
                version += 1
                given = run.publish(version)
            case 1 if replica.role == "rollout":
                given = run.tell(ReplicaLeft(replica=name, reason="killed"))
                given |= run.join(name, f"m{chance.randrange(6)}", serves=chance.random() < 0.5)
            case 2 if replica.loading >= 0:
                event = LoadFailed(replica=name, version=replica.loading, reason="killed")
                given = run.tell(event)
            case 3 if replica.loading >= 0:
                given = run.loaded(name, replica.loading)
            case _:
                given = run.tell(Progress(replica=name, count=1))
        for who, order in given.items():
            waits_for.pop(who, None)
            if order.holder:
                waits_for[who] = replicas[order.holder]
        for name in replicas:
            follow(name, replicas, waits_for)


def follow(
    name: str, replicas: Mapping[str, ReplicaState], waits_for: Mapping[str, ReplicaState]
) -> None:
    """Go from who is loading to who sends it that, and on, to the policy or who has it whole."""
    seen = {name}
    while (wanted := replicas[name].loading) >= 0 and (holder := waits_for.get(name)):
        if replicas.get(holder.name) is not holder:
            return  # it is gone, and who waits for it is told so by the connection
        assert holder.name not in seen
        assert holder.loading == wanted or holder.version >= wanted or holder.failed_loads
        seen.add(holder.name)
        name = holder.name
