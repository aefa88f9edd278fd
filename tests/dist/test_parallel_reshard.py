"""A checkpoint of FSDP ranks resumes under tensor and pipeline parallelism with the same losses."""

import json
from pathlib import Path

import pytest
from process_trees import run_tree

SCRIPT = Path(__file__).with_name("reshard_ranks.py")
OTHERS = ["tp2", "fsdp2-tp2", "pp2"]


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("reshard")
    run_tree(SCRIPT, directory, "fsdp4", *OTHERS, deadline_s=280)
    return directory


@pytest.mark.slow
@pytest.mark.parametrize("layout", OTHERS)
def test_four_fsdp_ranks_resume_under_other_axes(written, layout):
    expected = json.loads((written / "fsdp4.json").read_text())
    found = json.loads((written / f"{layout}.json").read_text())
    for mine, theirs in zip(found, expected, strict=True):
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
        assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-4)
        assert mine["lr"] == theirs["lr"]
