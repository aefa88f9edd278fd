"""Stacks of experts that tensor parallelism splits: files, checkpoints and weight sync of them."""

import json
import math
from pathlib import Path

import pytest
import torch
from process_trees import run_tree
from safetensors.torch import load_file
from tiny_models import tiny_config, write_random

RANKS = Path(__file__).with_name("expert_stack_ranks.py")
WHOLE = {"degrees": {}, "num_ranks": 1}
SPLIT = {"degrees": {"tp": 2}, "num_ranks": 2}
CASES = [
    {"name": "whole", "checkpoints": "of-whole", **WHOLE},
    {"name": "split", "checkpoints": "of-split", "describes": True, **SPLIT},
    {"name": "whole-of-split", "checkpoints": "of-split", "resumes": True, "last": True, **WHOLE},
    {"name": "split-of-whole", "checkpoints": "of-whole", "resumes": True, **SPLIT},
    {
        "name": "shared-of-split",
        "checkpoints": "of-split",
        "resumes": True,
        "degrees": {"tp": 2},
        "num_ranks": 4,
    },
]
REFUSED = {"name": "refused", "refuses": True, **SPLIT}


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("stacks")
    write_random(tiny_config("mixtral"), directory / "model")
    lines = "\n".join(json.dumps(case) for case in (*CASES, REFUSED))
    run_tree(RANKS, directory, deadline_s=280, given=lines)
    return directory


def result(written: Path, name: str) -> dict:
    found = json.loads((written / f"{name}.json").read_text())
    assert "error" not in found, found["error"]
    return found["steps"]


@pytest.mark.slow
@pytest.mark.parametrize("name", [case["name"] for case in CASES[1:]])
def test_a_checkpoint_goes_on_under_any_layout(written, name):
    found = result(written, name)["reports"]
    expected = result(written, "whole")["reports"][-len(found) :]
    for mine, theirs in zip(found, expected, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-5)


@pytest.mark.slow
def test_an_export_of_parts_is_what_was_loaded(written):
    result(written, "split")
    exported = load_file(written / "split-exported" / "model.safetensors")
    original = load_file(written / "model" / "model.safetensors")
    assert exported.keys() == original.keys()
    for name, value in original.items():
        torch.testing.assert_close(exported[name], value, rtol=0, atol=0)


@pytest.mark.slow
def test_weight_sync_has_every_element_of_a_stack_once(written):
    everyone = result(written, "split")["boxes"]
    name = "model.layers.1.mlp.experts.gate_up_proj"
    mine = [sorted(box[1:] for box in boxes if box[0] == name) for boxes in everyone]
    # 4 experts, 64 features of gate, then 64 of up, 32 inputs: halves of each on either rank
    assert mine == [
        [[[0, 0, 0], [4, 32, 32]], [[0, 64, 0], [4, 32, 32]]],
        [[[0, 32, 0], [4, 32, 32]], [[0, 96, 0], [4, 32, 32]]],
    ]
    down = [
        box[2] for boxes in everyone for box in boxes if box[0].endswith("1.mlp.experts.down_proj")
    ]
    assert sum(math.prod(shape) for shape in down) == 4 * 32 * 64


@pytest.mark.slow
def test_experts_that_the_plan_does_not_fit_are_refused(written):
    biased, turned, odd = result(written, "refused")["refusals"]
    assert biased == (
        "tp: of experts, the model's plan and its parameters differ in down_proj_bias, "
        "gate_up_proj_bias"
    )
    assert turned == "tp: the model's plan splits experts in a way that is not supported"
    assert odd == "tp 2 does not divide the 5 features of experts.gate_up_proj"
