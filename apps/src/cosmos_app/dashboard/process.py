"""The process that serves a run's dashboard, as whoever runs the run starts and ends it."""

import os
import subprocess
import sys
from pathlib import Path
from typing import IO

from cosmos_app.parent import as_parent

_END_S = 3.0


def start_dashboard(
    run_dir: Path, *, log: IO[bytes], says: IO[bytes] | int | None
) -> subprocess.Popen[bytes]:
    """Start it.

    Args:
        run_dir: of the run.
        log: where its errors go.
        says: where it says its address, if it does, a file or its descriptor; ``None`` for this
            process's own output.

    Raises:
        OSError: if that cannot be done, without which a run goes on.
    """
    return subprocess.Popen(
        [sys.executable, "-m", "cosmos_app", "dashboard", str(run_dir)],
        stdin=subprocess.DEVNULL,
        stdout=says,
        stderr=log,
        env={**os.environ, **as_parent()},
    )


def end_dashboard(process: subprocess.Popen[bytes]) -> None:
    """End it, and wait for that."""
    process.terminate()
    try:
        process.wait(_END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
