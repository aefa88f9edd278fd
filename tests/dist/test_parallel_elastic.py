"""Replicas die, are stopped, wake up and join; the losses are those of a run where nobody does."""

import itertools
import json
from pathlib import Path

import pytest
import torch
from process_trees import run_tree

pytest.importorskip("torchft")
SCRIPT = Path(__file__).with_name("elastic_replicas.py")
# of the script's replicas; and for a loaded machine, far from the 60 s and 90 s of other limits
LEASE_S, SLACK_S = 3.0, 30.0
LONG_STEP = Path(__file__).with_name("long_step_replicas.py")


@pytest.fixture(scope="module", params=[1, 2], ids=["one_rank_each", "two_ranks_each"])
def written(request, tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("elastic")
    run_tree(SCRIPT, directory, request.param, deadline_s=280, environment={"RUST_LOG": "error"})
    return directory


def lines(directory: Path, name: str) -> list[dict]:
    return json.loads((directory / f"{name}.json").read_text())


@pytest.mark.slow
def test_the_losses_and_weights_are_those_of_fixed_members(written):
    expected, weights = torch.load(written / "fixed.pt")
    for name in ("policy-0", "policy-1", "policy-2"):
        for line in lines(written, name):
            if "loss" in line:
                loss, lr = expected[line["step"]]
                assert line["loss"] == pytest.approx(loss, rel=1e-4), (name, line)
                assert line["lr"] == lr
    first, second = (torch.load(written / f"{name}.pt") for name in ("policy-1", "policy-2"))
    assert first[0] == second[0] == len(expected)
    for key, value in first[1].items():
        assert torch.equal(value, second[1][key])
        torch.testing.assert_close(value, weights[key], rtol=0, atol=2e-4)


@pytest.mark.slow
def test_every_step_is_taken_once_by_those_who_were_there(written):
    seen = {name: lines(written, name) for name in ("policy-0", "policy-1", "policy-2")}
    for name, found in seen.items():
        taken = [line["step"] for line in found if "loss" in line]
        assert taken == sorted(set(taken)), name
        for line in found:
            for other in line["names"] if "loss" in line else ():
                if other != "policy-0" or line["step"] != 5:  # who died may not have said so
                    assert line["step"] in [x["step"] for x in seen[other] if "loss" in x]
    total = {line["step"] for found in seen.values() for line in found if "loss" in line}
    assert total == set(range(len(total)))


@pytest.mark.slow
def test_a_kill_in_mid_step_costs_that_step_only(written):
    survivor = lines(written, "policy-1")
    at_death = [line for line in survivor if line["step"] == 6]
    assert "lost" in at_death[0]
    assert at_death[0]["names"] == ["policy-0", "policy-1"]
    assert at_death[-1]["names"] == ["policy-1"]
    assert len(at_death) == 2
    assert [line["step"] for line in survivor if "lost" in line and line["step"] < 12] == [6]
    # the one who died was there for every step before, from the one at which it came
    came, *later = (line["step"] for line in lines(written, "policy-0"))
    assert [came, *later] == list(range(came, 6))


@pytest.mark.slow
def test_who_dies_or_stops_is_noticed_by_the_lease_and_the_others_go_on(written):
    survivor, joiner = lines(written, "policy-1"), lines(written, "policy-2")
    (lost,) = (line for line in survivor if "lost" in line and line["step"] == 6)
    assert lost["lost"] == ["policy-0"]
    assert lost["seconds"] < LEASE_S + SLACK_S
    # until the survivor of the death is stopped itself, and then of who goes on without it
    before = [line for line in survivor if line["step"] <= 6]
    assert before[-1]["names"] == ["policy-1"]
    for found in (before, joiner):
        assert all(b["at_s"] - a["at_s"] < LEASE_S + SLACK_S for a, b in itertools.pairwise(found))
    assert any(line["names"] == ["policy-2"] for line in joiner)


@pytest.mark.slow
def test_a_joiner_starts_from_a_peer_and_counts_at_once(written):
    first = lines(written, "policy-2")[0]
    assert first["healed_by"] == "policy-1"
    assert first["names"] == ["policy-1", "policy-2"]
    assert first["step"] >= 9


@pytest.mark.slow
def test_a_replica_that_sleeps_over_its_lease_comes_back_from_a_peer(written):
    sleeper = lines(written, "policy-1")
    woken = [line for line in sleeper if line.get("healed_by") == "policy-2"]
    assert len(woken) == 1
    before = max(x["step"] for x in sleeper if x["step"] < woken[0]["step"] and "loss" in x)
    # it slept while the other took at least three steps
    assert woken[0]["step"] - before >= 3


@pytest.mark.slow
def test_who_comes_during_a_long_step_takes_none_apart(tmp_path):
    run_tree(LONG_STEP, tmp_path, deadline_s=120, environment={"RUST_LOG": "error"})
    together = ["policy-0", "policy-1", "policy-2"]
    members = {line["step"]: line["names"] for line in lines(tmp_path, "policy-0")}
    assert members == {step: ["policy-0"] if step <= 2 else together for step in range(6)}
    for name in together[1:]:
        found = lines(tmp_path, name)
        assert [line["step"] for line in found] == [3, 4, 5]
        assert found[0]["healed_by"] == "policy-0"
