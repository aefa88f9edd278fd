"""Losses with a reference or a teacher, and of a reward model, under pipelines.

Their steps are those of one process.

CI runs a choice of layouts; ``--parallel-axes all`` runs all.
"""

import json
from pathlib import Path

import pytest
import transformers
from process_trees import run_tree
from staged_layouts import SIZES, STAGED, selected
from tiny_models import write_random

pytestmark = pytest.mark.timeout(900)  # one tree of processes runs every case
POOL = Path(__file__).with_name("scoring_pool.py")
LARGER = SIZES | {"hidden_size": 48, "num_hidden_layers": 5}
LOSSES = (
    "kl-in-loss",
    "kl-in-reward",
    "moving-reference",
    "teacher",
    "likeliest",
    "teacher-and-reference",
    "dpo",
    "kto",
    "reward-model",
    "distillation",
    "distillation-top-k",
)


# of transformers' models
LAYOUTS = STAGED | {
    "generic-pp2": STAGED["pp2"],
    "generic-cp2-pp2": (4, {"cp": 2, "pp": 2}),
}
IN_CI = ("pp2", "pp2-zero-bubble", "generic-pp2")


def pytest_generate_tests(metafunc):
    if "layout" in metafunc.fixturenames:
        metafunc.parametrize("layout", selected(metafunc.config, LAYOUTS, IN_CI))


@pytest.fixture(scope="module")
def results(tmp_path_factory, request) -> dict:
    directory = tmp_path_factory.mktemp("scorers")
    for number, name in enumerate(("model", "reference", "teacher")):
        sizes = LARGER if name == "teacher" else SIZES
        write_random(transformers.Qwen3Config(**sizes), directory / name, seed=number)
    cases = [{"name": "whole", "num_ranks": 1, "degrees": {}, "losses": LOSSES}]
    for name in selected(request.config, LAYOUTS, IN_CI):
        num_ranks, degrees = LAYOUTS[name]
        case = {"name": name, "num_ranks": num_ranks, "degrees": degrees, "losses": LOSSES}
        if name.startswith("generic"):
            case["implementation"] = "transformers"
        cases.append(case)
    lines = "\n".join(json.dumps(case) for case in cases)
    run_tree(POOL, directory, deadline_s=800, given=lines)
    return {
        case["name"]: json.loads((directory / f"{case['name']}.json").read_text()) for case in cases
    }


@pytest.mark.slow
@pytest.mark.parametrize("loss", LOSSES)
def test_stages_take_the_steps_of_one_process(results, layout, loss):
    whole, found = results["whole"], results[layout]
    assert "error" not in whole, whole["error"]
    assert "error" not in found, found["error"]
    *steps, numbers = found["steps"][loss]
    *expected, _ = whole["steps"][loss]
    for mine, theirs in zip(steps, expected, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-4, abs=1e-6)
    fewest, most = numbers[0::2], numbers[1::2]
    if layout == "fsdp2-pp2":  # ranks of different data fill in for each other
        assert any(-few < many for few, many in zip(fewest, most, strict=True))
