"""Scripts that start processes of their own, run with a deadline after which all of them end.

They are forked from one process that has imported what they do: each would begin with ten CPU
seconds of imports otherwise. Where the environment is to be another, they are started.
"""

import contextlib
import functools
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from forked_scripts import TRAINERS, Forked, Warm, read_by_imports

# scripts end before what Python's collector costs is worth its while
_START = "import gc; gc.disable(); import sys, process_trees; process_trees.run(*sys.argv[1:])"


def run(script: str, *arguments: str) -> None:
    """Run a script in this process, as Python does that is given its path."""
    sys.argv = [script, *arguments]
    sys.path[0] = str(Path(script).parent)
    runpy.run_path(script, run_name="__main__")


def run_tree(
    script: Path,
    *arguments: object,
    deadline_s: float,
    given: str = "",
    environment: Mapping[str, str] | None = None,
) -> str:
    """Run a script to its end and return what it wrote; it must end well, and forks what it starts.

    Args:
        script: run by this interpreter, with this process's import path and one thread.
        *arguments: of its command line.
        deadline_s: everything that it started is killed then.
        given: its standard input.
        environment: added to this process's own.
    """
    with tempfile.TemporaryDirectory(prefix="script-") as folder:
        log, read = Path(folder, "log"), Path(folder, "given")
        read.write_text(given)
        started = _start([str(script), *map(str, arguments)], log, read, environment)
        code = _wait([started], deadline_s)[0]
        output = log.read_text(errors="replace")
    assert code == 0, output
    return output


def run_ranks(
    worker: str, root: Path, commands: Sequence[Sequence[object]], deadline_s: float
) -> None:
    """Run one program in several processes at once, each with its own arguments; all must end well.

    Args:
        worker: the program's text; it has this process's import path and one thread.
        root: where the program lies then, and each process leaves what it wrote, in a ``.log`` file
            of its own.
        commands: the arguments of each.
        deadline_s: after which they are killed.
    """
    script, nothing = root / "worker.py", Path(os.devnull)
    script.write_text(worker)
    started = [
        _start(
            [str(script), *map(str, arguments)], root / f"rank{rank}of{len(commands)}.log", nothing
        )
        for rank, arguments in enumerate(commands)
    ]
    codes = _wait(started, deadline_s)
    logs = "\n".join(file.read_text()[-3000:] for file in sorted(root.glob("*.log")))
    assert codes == [0] * len(commands), logs


def found_by_ranks(
    script: Path, directory: Path, numbers: Sequence[int], *, deadline_s: float, given: str
) -> dict[int, list[Any]]:
    """Run a script that leaves NUMBER-RANK.pt for one process and for each number of ranks.

    Returns:
        By number, 1 among them, what each rank found.
    """
    import torch

    run_tree(script, directory, *numbers, deadline_s=deadline_s, given=given)
    return {
        number: [torch.load(directory / f"{number}-{rank}.pt") for rank in range(number)]
        for number in (1, *numbers)
    }


def _start(
    command: Sequence[str], log: Path, given: Path, environment: Mapping[str, str] | None = None
) -> Forked | subprocess.Popen[bytes]:
    """Have a script run in a session of its own, which writes into a log."""
    path = os.pathsep.join(filter(None, sys.path))
    added = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", **(environment or {})}
    whole = {**os.environ, **added}
    with log.open("wb") as output, given.open("rb") as read:
        if not environment and read_by_imports(os.environ) == _first_environment():
            origin, to = Warm(TRAINERS, whole), output.fileno()
            return Forked(command, origin, stdin=read.fileno(), stdout=to, stderr=to)
        return subprocess.Popen(
            [sys.executable, "-c", _START, *command],
            env=whole,
            stdin=read,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )


@functools.cache
def _first_environment() -> Mapping[str, str]:
    """Return what imports ask for where a script is forked at first: one who forks is enough."""
    return read_by_imports(os.environ)


def _wait(
    processes: Sequence[Forked | subprocess.Popen[bytes]], deadline_s: float
) -> list[int | None]:
    """Return how each ended; those that have not in this time are killed with what they started."""
    end = time.monotonic() + deadline_s
    try:
        for process in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, end - time.monotonic()))
        return [process.poll() for process in processes]
    finally:
        for process in processes:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
