"""Critics under pipelines and other axes: the steps of one process, and checkpoints across them.

CI runs a choice of layouts; ``--parallel-axes all`` runs all.
"""

import json
from pathlib import Path

import pytest
import torch
import transformers
from process_trees import run_tree
from safetensors.torch import load_file
from staged_layouts import SIZES, STAGED, STAGED_IN_CI, selected
from tiny_models import write_random

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # one tree of processes runs every case
POOL = Path(__file__).with_name("critic_pool.py")
CRITICS = ("clipped", "plain", "kl-in-reward", "moving-reference")
LAYOUTS = STAGED | {
    "cp2-pp2": (4, {"cp": 2, "pp": 2}),
    "tp2": (2, {"tp": 2}),
    "cp2": (2, {"cp": 2}),
    "generic-tp2": (2, {"tp": 2}),
    "generic-cp2": (2, {"cp": 2}),
    "generic-tp2-cp2": (4, {"tp": 2, "cp": 2}),
    "generic-pp2": (2, {"pp": 2}),
    "generic-cp2-pp2": (4, {"cp": 2, "pp": 2}),
}
# the last two with models of transformers
IN_CI = (*STAGED_IN_CI, "generic-pp2", "generic-cp2-pp2")
KEPT = ("clipped", "moving-reference")  # critics that checkpoints are written of
NATIVE = {"implementation": "native"}  # whose names checkpoints have


def pytest_generate_tests(metafunc):
    if "layout" in metafunc.fixturenames:
        metafunc.parametrize("layout", selected(metafunc.config, LAYOUTS, IN_CI))


@pytest.fixture(scope="module")
def directory(tmp_path_factory, request) -> Path:
    """Where every layout has left its results."""
    place = tmp_path_factory.mktemp("critics")
    for number, name in enumerate(("model", "reference")):
        write_random(transformers.Qwen3Config(**SIZES), place / name, seed=number)
    one = {"num_ranks": 1, "degrees": {}}
    cases = [
        {"name": "whole", "critics": CRITICS, "export": "whole-export", **one},
        {"name": "alone", "critics": KEPT, "save": "alone-saved", **one, **NATIVE},
    ]
    for name in selected(request.config, LAYOUTS, IN_CI):
        num_ranks, degrees = LAYOUTS[name]
        kept = {"save": "pp2-saved", "export": "pp2-export"} if name == "pp2" else {}
        case = {"name": name, "num_ranks": num_ranks, "degrees": degrees}
        if name.startswith("generic"):
            case["implementation"] = "transformers"
        cases.append({**case, "critics": CRITICS, **kept})
    num_ranks, degrees = LAYOUTS["pp2-zero-bubble"]
    stages = {"name": "resumed-in-stages", "num_ranks": num_ranks, "degrees": degrees}
    alone = {"name": "resumed-alone", **one, **NATIVE, "last": True}
    cases.append({**stages, "critics": KEPT, "load": "alone-saved"})
    cases.append({**alone, "critics": KEPT, "load": "pp2-saved"})
    run_tree(POOL, place, deadline_s=800, given="\n".join(json.dumps(case) for case in cases))
    return place


def steps_of(directory: Path, name: str) -> dict[str, list[list[float]]]:
    found = json.loads((directory / f"{name}.json").read_text())
    assert "error" not in found, found["error"]
    return found["steps"]


def assert_same(steps: list[list[float]], expected: list[list[float]]) -> None:
    """Compare clipped tokens, loss, gradient norm and metrics; at last the head and its average."""
    for mine, theirs in zip(steps, expected, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("critic", CRITICS)
def test_every_layout_takes_the_steps_of_one_process(directory: Path, layout: str, critic: str):
    found = steps_of(directory, layout)
    assert_same(found[critic], steps_of(directory, "whole")[critic])
    fewest, most = found["numbers"][0::2], found["numbers"][1::2]
    if layout == "fsdp2-pp2":  # ranks of different data fill in for each other
        assert any(-few < many for few, many in zip(fewest, most, strict=True))


def test_values_and_ratios_were_held_back_and_the_head_moved(directory: Path) -> None:
    *steps, head = steps_of(directory, "whole")["clipped"]
    for place in (0, 1):  # of the policy, of the critic
        assert max(step[place] for step in steps) > 0.0
    assert max(map(abs, head)) > 1e-3


def test_one_process_and_stages_go_on_from_each_others_checkpoints(directory: Path) -> None:
    for resumed in ("resumed-in-stages", "resumed-alone"):
        for name in KEPT:
            expected = steps_of(directory, "whole")[name][-2:]
            assert_same(steps_of(directory, resumed)[name], expected)


def test_stages_export_the_language_model_alone(directory: Path) -> None:
    found, expected = (
        load_file(directory / f"{name}-export" / "clipped" / "model.safetensors")
        for name in ("pp2", "whole")
    )
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-5, msg=name)
