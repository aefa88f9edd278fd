"""Stacks of experts under Muon: however ranks divide them, each matrix takes the step it would."""

import json
from pathlib import Path

import pytest
from process_trees import run_tree

RANKS = Path(__file__).with_name("expert_muon_ranks.py")


@pytest.mark.slow
def test_ranks_that_divide_stacks_of_experts_take_the_steps_of_one(tmp_path):
    run_tree(RANKS, tmp_path, deadline_s=240)
    found = json.loads((tmp_path / "found.json").read_text())
    assert found.pop("moved") > 1e-2
    # Newton-Schulz runs in bfloat16, and sums of shards round elsewhere there
    tolerances = {name: 0.0 if name.startswith("experts") else 2e-3 for name in found}
    tolerances |= {"experts-and-rows": 2e-3, "experts-and-columns": 2e-3}
    assert len(found) == 6
    assert {n: d for n, d in found.items() if d > tolerances[n]} == {}
