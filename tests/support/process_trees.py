"""A script that starts processes of its own, run with a deadline after which all of them end."""

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path


def run_tree(
    script: Path,
    *arguments: object,
    deadline_s: float,
    given: str = "",
    environment: Mapping[str, str] | None = None,
) -> str:
    """Run a script to its end and return what it wrote; it must end well.

    Args:
        script: run by this interpreter, with this process's import path and one thread.
        *arguments: of its command line.
        deadline_s: everything that it started is killed then.
        given: its standard input.
        environment: added to this process's own.
    """
    process = subprocess.Popen(
        [sys.executable, str(script), *map(str, arguments)],
        start_new_session=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(sys.path),
            "OMP_NUM_THREADS": "1",
            **(environment or {}),
        },
    )
    try:
        output, _ = process.communicate(given, timeout=deadline_s)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, output
    return output
