"""A checkpoint of one layout resumes under others, stages and split matrices, with its losses."""

import json
from pathlib import Path

import pytest
from process_trees import run_tree

SCRIPT = Path(__file__).with_name("reshard_ranks.py")
# who saves, and then who resumes
RUNS = {
    "native": ["fsdp4", "tp2", "fsdp2-tp2", "pp2"],
    "sight": ["fsdp4", "tp2", "ep2-pp2"],
    "generic": ["fsdp4", "tp2", "pp2"],
    "tied": ["fsdp4", "pp2"],
    "lora": ["fsdp4", "fsdp2-tp2", "pp2"],
    "lora-stages": ["pp2", "one"],
    "head": ["pp2", "one"],
}


@pytest.fixture(scope="module", params=RUNS)
def written(request, tmp_path_factory) -> tuple[list[str], Path]:
    layouts = RUNS[request.param]
    directory = tmp_path_factory.mktemp(f"reshard-{request.param}")
    kind = request.param.removesuffix("-stages")
    run_tree(SCRIPT, directory, kind, *layouts, deadline_s=280)
    return layouts, directory


@pytest.mark.slow
def test_a_checkpoint_resumes_under_other_axes(written):
    (saver, *others), directory = written
    expected = json.loads((directory / f"{saver}.json").read_text())
    for layout in others:
        found = json.loads((directory / f"{layout}.json").read_text())
        for mine, theirs in zip(found, expected, strict=True):
            assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-5), layout
            assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-4), layout
            assert mine["lr"] == theirs["lr"]
