"""A checkpoint of FSDP ranks resumes under tensor and pipeline parallelism with the same losses."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("reshard_ranks.py")
OTHERS = ["tp2", "fsdp2-tp2", "pp2"]


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("reshard")
    process = subprocess.Popen(
        [sys.executable, str(SCRIPT), str(directory), "fsdp4", *OTHERS],
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(SCRIPT.parent), *sys.path]),
            "OMP_NUM_THREADS": "1",
        },
    )
    try:
        output, _ = process.communicate(timeout=280)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, output
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
