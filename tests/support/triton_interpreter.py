"""Kernels for GPUs in a process in which Triton interprets them on the CPU."""

import os
import subprocess
import sys

_DONE = "all of it"


def check_interpreted(script: str) -> None:
    """Run what asserts something of kernels, and fail as it does; Triton reads its mode once."""
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", f"{script}\nprint({_DONE!r})"],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.stdout == f"{_DONE}\n", run.stderr
