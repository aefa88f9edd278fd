"""Scripts that start processes of their own, run with a deadline after which all of them end.

They are forked from one process that has imported what they do: each would begin with ten CPU
seconds of imports otherwise. Where the environment is to be another, they are started.
"""

import contextlib
import functools
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

# `warm` says why nothing is collected
_START = "import gc; gc.disable(); import sys, process_trees; process_trees.run(*sys.argv[1:])"
# what no import of a script asks for: these may be others than when it was forked from
_READ_LATER = ("PYTEST_", "COSMOS_PRELOADER")


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
) -> BaseProcess | subprocess.Popen[bytes]:
    """Have a script run in a session of its own, which writes into a log."""
    whole = {**os.environ, **_added(), **(environment or {})}
    if not environment:
        context, forked_with = _forking()
        if _read_by_imports() == forked_with:
            arguments = (command, str(log), str(given), whole)
            process = context.Process(target=_run_forked, args=arguments)
            process.start()
            return process
    with log.open("wb") as output, given.open("rb") as read:
        return subprocess.Popen(
            [sys.executable, "-c", _START, *command],
            env=whole,
            stdin=read,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )


@functools.cache
def _forking() -> tuple[ForkServerContext, Mapping[str, str]]:
    """Have a process import what scripts do; return how to fork it, and what it imports by."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["warm"])
    with pytest.MonkeyPatch.context() as patch:
        for name, text in _added().items():
            patch.setenv(name, text)
        forkserver.ensure_running()
    return context, _read_by_imports()


def _added() -> dict[str, str]:
    """Return what scripts have in their environment besides what this process has."""
    return {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}


def _read_by_imports() -> Mapping[str, str]:
    return {name: text for name, text in os.environ.items() if not name.startswith(_READ_LATER)}


def _run_forked(
    command: Sequence[str], log: str, given: str, environment: Mapping[str, str]
) -> None:
    """Run a script in this process, which has been forked for it."""
    os.setsid()
    os.environ.update(environment)
    written = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    for descriptor, number in ((os.open(given, os.O_RDONLY), 0), (written, 1), (written, 2)):
        os.dup2(descriptor, number)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115 - multiprocessing has put nothing there
    run(*command)


def _wait(
    processes: Sequence[BaseProcess | subprocess.Popen[bytes]], deadline_s: float
) -> list[int | None]:
    """Return how each ended; those that have not in this time are killed with what they started."""
    end = time.monotonic() + deadline_s
    try:
        for process in processes:
            left = max(0.0, end - time.monotonic())
            if isinstance(process, BaseProcess):
                process.join(left)
            else:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(left)
        return [_code(process) for process in processes]
    finally:
        for process in processes:
            if _code(process) is None and process.pid is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)


def _code(process: BaseProcess | subprocess.Popen[bytes]) -> int | None:
    """Return how it ended; None if it has not."""
    return process.exitcode if isinstance(process, BaseProcess) else process.poll()
