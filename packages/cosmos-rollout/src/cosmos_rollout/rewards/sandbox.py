"""Runs a Python program that nobody has read, in a process with little to lose.

It has limits of processor time, wall time, memory and file size, an empty folder of its own, no
environment, and, where the kernel allows user name spaces, no network and no process that outlives
it. It can read what this user can read: it is a fence for a model's mistakes, not for an attacker.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from cosmos_rollout.errors import SandboxError
from cosmos_rollout.rewards.sandbox_child import NO_NAMESPACES

_CHILD = Path(__file__).with_name("sandbox_child.py")
_OUTPUT_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class SandboxLimits:
    """What one program may use.

    Attributes:
        timeout_s: seconds, of the wall and of the processor.
        memory_mib: address space.
        file_mib: size of any one file that it writes.
        namespaces: "required" refuses to run where the network cannot be taken away; "preferred"
            then runs with the other limits alone.
    """

    timeout_s: float = 5.0
    memory_mib: int = 512
    file_mib: int = 16
    namespaces: Literal["preferred", "required"] = "preferred"


@dataclass(frozen=True, kw_only=True, slots=True)
class ProgramResult:
    """What became of a program.

    Attributes:
        exit_code: 0 if it ended well; 128 and more if a signal ended it; None if it took too long.
        stdout: what it printed, its beginning if that is more than a MiB.
        stderr: what it complained of, likewise.
    """

    exit_code: int | None
    stdout: str
    stderr: str


def run_program(program: str, limits: SandboxLimits, *, stdin: str = "") -> ProgramResult:
    """Run a program to its end or its limits.

    Raises:
        SandboxError: if name spaces are required and the system has none to give.
    """
    settings = {
        "cpu_s": int(limits.timeout_s) + 1,
        "memory_bytes": limits.memory_mib << 20,
        "file_bytes": limits.file_mib << 20,
        "namespaces": limits.namespaces == "required",
    }
    with _own_folder() as outer:
        folder = outer / "work"
        folder.mkdir()
        (folder / "program.py").write_text(program, encoding="utf-8")
        command = [sys.executable, "-I", str(_CHILD), "program.py", json.dumps(settings)]
        result = _run(command, folder, stdin, limits.timeout_s)
    if settings["namespaces"] and result.exit_code == NO_NAMESPACES:
        raise SandboxError("this system gives no user name spaces, so the network stays reachable")
    return result


@contextlib.contextmanager
def _own_folder() -> Generator[Path]:
    """A folder that goes, whatever a program made of it."""
    outer = tempfile.mkdtemp(prefix="cosmos-sandbox-")
    try:
        yield Path(outer)
    finally:
        try:
            shutil.rmtree(outer)
        except (OSError, RecursionError):  # locked, or deeper than Python goes
            for command in (["chmod", "-R", "u+rwx"], ["rm", "-rf"]):
                subprocess.run(
                    [*command, "--", outer], check=False, capture_output=True, timeout=60
                )


def _run(command: list[str], folder: Path, stdin: str, timeout_s: float) -> ProgramResult:
    outputs = [folder.parent / name for name in ("stdin", "stdout", "stderr")]
    outputs[0].write_text(stdin, encoding="utf-8")
    with outputs[0].open("rb") as read, outputs[1].open("wb") as out, outputs[2].open("wb") as err:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env={"HOME": str(folder), "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
            stdin=read,
            stdout=out,
            stderr=err,
            start_new_session=True,
        )
        try:
            status = process.wait(timeout_s)
            exit_code = status if status >= 0 else 128 - status
        except subprocess.TimeoutExpired:
            exit_code = None
        finally:
            _end(process)
    return ProgramResult(exit_code=exit_code, stdout=_text(outputs[1]), stderr=_text(outputs[2]))


def _end(process: "subprocess.Popen[bytes]") -> None:
    """End the program and what it started in its session."""
    with contextlib.suppress(ProcessLookupError):  # all of it has ended
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _text(path: Path) -> str:
    with path.open("rb") as output:
        return output.read(_OUTPUT_BYTES).decode("utf-8", errors="replace")
