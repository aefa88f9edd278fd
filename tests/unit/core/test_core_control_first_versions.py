"""The first version of rollouts: who start together pass it on as it comes, in chains."""

import pytest
from weight_orders import Run, source_of

from cosmos_core.messages import LoadFailed, Progress, ReplicaJoined, ReplicaLeft, Tick

MACHINES = {"a": "m0", "b": "m1", "a2": "m0", "c": "m2", "b2": "m1"}


def test_rollouts_that_start_together_have_their_first_version_from_one_another():
    run = Run(MACHINES, starts=True)
    sources = {name: source_of(order) for name, order in run.first.items()}
    assert sources == {"a": "policy-0", "a2": "a", "b": "a", "b2": "b", "c": "b"}
    described_by = {name: order.described_by for name, order in run.first.items()}
    assert described_by.pop("a") == ()
    assert set(described_by.values()) == {("policy-0:0",)}


def test_there_are_as_many_chains_of_first_versions_as_the_policy_can_feed():
    run = Run({f"r{i}": f"m{i}" for i in range(5)}, starts=True, policy_ranks=4, ranks=2)
    sources = [source_of(run.first[f"r{i}"]) for i in range(5)]
    assert sources == ["policy-0", "policy-0", "r0", "r1", "r2"]


def test_who_comes_while_the_first_loads_has_it_from_that_one_and_later_from_who_is_idle():
    run = Run({"a": "m0"}, starts=True)
    assert source_of(run.join("b", "m1", serves=True)["b"]) == "a"
    run.loaded("a", 3)
    assert source_of(run.join("c", "m2", serves=True)["c"]) == "b", "a sends to b still"
    run.loaded("b", 3)
    assert source_of(run.join("d", "m3", serves=True)["d"]) == "a"
    assert source_of(run.join("d2", "m3", serves=True)["d2"]) == "d", "it is on the same machine"


def test_many_that_come_at_once_are_no_burden_to_the_one_that_has_the_version():
    run = Run({"a": "m0"}, starts=True)
    run.loaded("a", 3)
    given = [run.join(f"r{i}", f"n{i}", serves=True)[f"r{i}"] for i in range(6)]
    assert [source_of(order) for order in given] == ["a", "r0", "r1", "r2", "r3", "r4"]


def test_rollouts_that_cannot_serve_before_they_have_loaded_are_sent_to_the_policy():
    run = Run({}, starts=True)
    assert source_of(run.join("a", "m0", serves=False)["a"]) == "policy-0"
    assert source_of(run.join("b", "m1", serves=True)["b"]) == "policy-0"
    assert source_of(run.join("c", "m2", serves=True)["c"]) == "b"


def test_who_failed_to_load_its_first_version_or_may_hang_passes_nothing_on():
    run = Run({"a": "m0", "b": "m1"}, starts=True)
    run.tell(LoadFailed(replica="b", version=3, reason="no memory"))
    assert source_of(run.join("c", "m2", serves=True)["c"]) == "a"
    run.now += 8.0
    run.tell(Progress(replica="c", count=1))
    assert source_of(run.join("d", "m3", serves=True)["d"]) == "c"
    assert source_of(run.tell(Tick())["b"]) == "policy-0"


def test_a_first_load_whose_sender_is_gone_is_made_up_for_by_the_policy():
    run = Run({"a": "m0", "b": "m1"}, starts=True)
    run.tell(ReplicaLeft(replica="a", reason="killed"))
    run.tell(LoadFailed(replica="b", version=3, reason="it was killed"))
    run.now += 5.0
    assert source_of(run.tell(Tick())["b"]) == "policy-0"


@pytest.mark.parametrize("loads", [True, False])
def test_nobody_has_its_first_version_from_who_may_have_one_of_a_lost_lineage(loads):
    """The policy dies and comes back with what a checkpoint has while rollouts load."""
    run = Run({"a": "m0"}, starts=True)
    if loads:
        run.loaded("a", 3)
    run.tell(ReplicaLeft(replica="policy-0", reason="killed"))
    run.tell(ReplicaJoined(replica="policy-0", role="policy", version=1, endpoints=("policy-0:9",)))
    assert run.controller.state.line, "what came after version 1 is lost"
    given = run.join("b", "m1", serves=True)
    assert source_of(given["b"]) == "policy-0"


def test_nobody_is_sent_to_who_has_the_version_out_of_the_model_s_files_alone():
    run = Run({}, starts=True)
    of_files = ReplicaJoined(
        replica="a", role="rollout", slots=1, version=3, endpoints=("a:0",), host="m0"
    )
    assert not run.tell(of_files)
    assert source_of(run.join("b", "m0", serves=True)["b"]) == "policy-0"


def test_who_comes_to_the_policy_s_machine_goes_no_further():
    run = Run({"a": "m0", "near": "p"}, starts=True)
    assert {name: source_of(order) for name, order in run.first.items()} == {
        "a": "policy-0",
        "near": "policy-0",
    }
    run.loaded("a", 3)
    assert source_of(run.join("nearer", "p", serves=True)["nearer"]) == "policy-0"
    run.loaded("near", 3)
    assert source_of(run.join("nearest", "p", serves=True)["nearest"]) == "near"
