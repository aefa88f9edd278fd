"""The examples of the package run as they stand, and do what they say."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import torch

import cosmos_weightsync

_SOURCE = Path(cosmos_weightsync.__file__).parents[1]
_EXAMPLES = _SOURCE.parent / "examples"
_SAVE = """
import sys, torch
local = {name: value.detach().to_local() for name, value in model.named_parameters()}
torch.save(local, f"{sys.argv[1]}/{rank}.pt")
"""


def torchrun(script: Path, num_ranks: int, *arguments: object) -> None:
    process = subprocess.Popen(
        [
            sys.executable, "-m", "torch.distributed.run", "--standalone",
            f"--nproc-per-node={num_ranks}", str(script), *map(str, arguments),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONPATH": str(_SOURCE), "OMP_NUM_THREADS": "1"},
        start_new_session=True,
    )  # fmt: skip
    try:
        out, _ = process.communicate(timeout=240)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    assert process.returncode == 0, out[-3000:]


def test_an_fsdp_trainer_feeds_a_tensor_parallel_module_in_under_20_lines(tmp_path):
    text = (_EXAMPLES / "fsdp_to_tensor_parallel.py").read_text()
    code = text.partition('"""\n')[2]
    steps = [line for line in code.splitlines() if line and "import" not in line]
    assert len(steps) < 20
    script = tmp_path / "example.py"
    script.write_text(text + _SAVE)
    torchrun(script, 4, tmp_path)
    held = [torch.load(tmp_path / f"{rank}.pt") for rank in range(4)]
    for name in ("weight", "bias"):
        trained = torch.cat([rank[name] for rank in held[:2]])
        assert torch.equal(torch.cat([rank[name] for rank in held[2:]]), trained)
