"""A checkpoint of FSDP ranks resumes under tensor and pipeline parallelism with the same losses."""

import json
from pathlib import Path

import pytest
from process_trees import run_tree

SCRIPT = Path(__file__).with_name("reshard_ranks.py")
OTHERS = {
    "native": ["tp2", "fsdp2-tp2", "pp2"],
    "sight": ["tp2", "ep2-pp2"],
    "generic": ["tp2", "pp2"],
    "tied": ["pp2"],
    "lora": ["fsdp2-tp2"],
}


@pytest.fixture(scope="module", params=OTHERS)
def written(request, tmp_path_factory) -> tuple[str, Path]:
    kind = request.param
    directory = tmp_path_factory.mktemp(f"reshard-{kind}")
    run_tree(SCRIPT, directory, kind, "fsdp4", *OTHERS[kind], deadline_s=280)
    return kind, directory


@pytest.mark.slow
def test_four_fsdp_ranks_resume_under_other_axes(written):
    kind, directory = written
    expected = json.loads((directory / "fsdp4.json").read_text())
    for layout in OTHERS[kind]:
        found = json.loads((directory / f"{layout}.json").read_text())
        for mine, theirs in zip(found, expected, strict=True):
            assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-5), layout
            assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-4), layout
            assert mine["lr"] == theirs["lr"]
