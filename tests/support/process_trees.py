"""A script that starts processes of its own, run with a deadline after which all of them end."""

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

# A third of what importing torch costs, and a twelfth of what ranks forked from it do, is Python's
# collector going through the modules. These processes end before their garbage is worth its while.
_UNCOLLECTED = "import gc\ngc.disable()\n"
_SCRIPT = (
    _UNCOLLECTED
    + """
import runpy, sys
from pathlib import Path

del sys.argv[0]
sys.path[0] = str(Path(sys.argv[0]).parent)
runpy.run_path(sys.argv[0], run_name="__main__")
"""
)


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
    process = subprocess.Popen(
        [sys.executable, "-c", _SCRIPT, str(script), *map(str, arguments)],
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


def run_ranks(
    worker: str, root: Path, commands: Sequence[Sequence[object]], deadline_s: float
) -> None:
    """Run one program in several processes at once, each with its own arguments; all must end well.

    Args:
        worker: the program's text; it has this process's import path and one thread.
        root: where each process leaves what it wrote, in a ``.log`` file of its own.
        commands: the arguments of each.
        deadline_s: after which they are killed.
    """
    path = os.pathsep.join(part for part in sys.path if part)
    ranks: list[subprocess.Popen[bytes]] = []
    for rank, arguments in enumerate(commands):
        with (root / f"rank{rank}of{len(commands)}.log").open("w") as log:
            ranks.append(
                subprocess.Popen(
                    [sys.executable, "-c", _UNCOLLECTED + worker, *map(str, arguments)],
                    env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            )
    try:
        codes = [rank.wait(timeout=deadline_s) for rank in ranks]
    finally:
        for rank in ranks:
            if rank.poll() is None:
                os.killpg(rank.pid, signal.SIGKILL)
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
