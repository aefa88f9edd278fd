"""Runs a Python program that nobody has read, in a process with little to lose.

It has limits of processor time, wall time, memory, file size and number of processes, an empty
folder of its own, no environment and nothing that outlives it. Where the kernel allows user name
spaces it has no network, a file system that is read-only, and nothing of this user's home and of
temporary folders; where it has Landlock alone, rules that come near to that (`SandboxProtection`).
It is a fence for a model's mistakes and its cheating: an attacker may know a hole in the kernel.
"""

import contextlib
import json
import math
import os
import pwd
import re
import secrets
import select
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from cosmos_core.temporary import temporary_directories
from cosmos_rollout.errors import SandboxError
from cosmos_rollout.rewards.questions import ask
from cosmos_rollout.rewards.sandbox_child import (
    HALF_ENCLOSED,
    NO_NAMESPACES,
    OPEN_FILES,
)

_CHILD = Path(__file__).with_name("sandbox_child.py")
_GUARD_GRACE_S = 30.0
_ANSWER = re.compile(r"(\d+) (.*)")
_REFUSED = {
    NO_NAMESPACES: "this system gives no user name spaces, so the network stays reachable",
    OPEN_FILES: "this system has neither mounts of one's own nor Landlock, so files stay open",
}
_SHARED_FOLDERS = ("/tmp", "/var/tmp", "/dev", "/run", "/var/run")
_NEVER_HIDDEN = ("/", "/usr", "/bin", "/sbin", "/usr/sbin", "/lib", "/etc")


@dataclass(frozen=True, kw_only=True, slots=True)
class SandboxLimits:
    """What one program may use.

    Attributes:
        timeout_s: seconds, of the wall and of the processor.
        memory_mib: address space of each of its processes.
        file_mib: size of any one file that it writes.
        files_mib: size of all of them, where they are in memory: see `SandboxProtection`.
        output_mib: how much is kept of what it prints, and of what it complains of.
        max_processes: processes and threads at a time; its own is the first. Where the kernel
            does not count them for the program alone, the program is ended for more than these.
        readable: files and folders that it may read though they lie where it sees nothing: in this
            user's home, in the folder where this process works, or in temporary ones.
        namespaces: "required" refuses to run where the network cannot be taken away or files of
            this user's stay open; "preferred" then runs with what there is.
    """

    timeout_s: float = 5.0
    memory_mib: int = 512
    file_mib: int = 16
    files_mib: int = 64
    output_mib: int = 1
    max_processes: int = 64
    readable: tuple[str, ...] = ()
    namespaces: Literal["preferred", "required"] = "preferred"

    def __post_init__(self) -> None:
        """Refuse limits that no program can keep.

        Raises:
            ValueError: naming them all.
        """
        if not 0.0 < self.timeout_s < math.inf or self.memory_mib < 64 or self.max_processes < 1:
            raise ValueError(
                "timeout_s and max_processes have to be positive and finite and memory_mib 64 or "
                f"more, found {self.timeout_s}, {self.max_processes} and {self.memory_mib}"
            )
        if self.file_mib < 0 or self.files_mib < 0:
            raise ValueError(
                "file_mib and files_mib have to be 0 or more, found "
                f"{self.file_mib} and {self.files_mib}"
            )
        if self.output_mib < 0:
            raise ValueError(f"output_mib has to be 0 or more, found {self.output_mib}")


@dataclass(frozen=True, kw_only=True, slots=True)
class SandboxProtection:
    """What is shut to programs on this system, beside their limits.

    Attributes:
        no_network: whether they have no network, and see no processes but their own.
        files: "own": they see the file system read-only, and empty folders in memory in the places
            of this user's home, the working folder, /tmp, /dev and /run. "rules": they can neither
            write nor read those, but for their own folder and /dev/shm; TCP and signals are
            refused where the kernel knows how. "open": they can what this user can.
    """

    no_network: bool
    files: Literal["own", "rules", "open"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ProgramResult:
    """What became of a program.

    Attributes:
        exit_code: 0 if it ended well; 128 and more if a signal ended it; None if it was ended
            because it took too long, or had too many processes.
        stdout: what it printed, its beginning if that is more than the limits keep.
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
    with _own_folder() as outer:
        return _run(program, outer, limits, stdin=stdin).result


def sandbox_protection(limits: SandboxLimits) -> SandboxProtection:
    """Run an empty program and tell what there was between it and the rest.

    Raises:
        SandboxError: if name spaces are required and the system has none to give, or if the
            program did not come to its end.
    """
    with _own_folder() as outer:
        run = _run("pass", outer, limits)
    if run.protection is None:
        raise SandboxError(f"an empty program was not done within {limits.timeout_s} s")
    return run.protection


def passes_test(program: str, test: str, limits: SandboxLimits) -> bool:
    """Run a program and then a test, in the same name space; return whether the test held.

    What the test compares with is not there for the program to see, and that a test with nothing
    to compare was reached to its end is told by a mark that comes when the program's own lines
    have run: see `questions`.

    Raises:
        SandboxError: if name spaces are required and the system has none to give.
    """
    asked, mark = ask(test), secrets.token_hex(16)
    with _own_folder() as outer:
        tests = json.dumps({"text": asked.text, "mark": mark}).encode() + b"\n"
        run = _run(program, outer, limits, tests=tests)
    lines = run.said.rstrip("\n").split("\n")
    found = [match for line in lines if (match := _ANSWER.fullmatch(line))]
    answers = [(int(match[1]), match[2]) for match in found]
    ended = run.result.exit_code == 0 and lines[-1:] == [f"end {mark}"]
    return ended and asked.is_passed(answers)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Run:
    """What came of a program, and what it said about its tests."""

    result: ProgramResult
    said: str
    protection: SandboxProtection | None


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


def _run(
    program: str, outer: Path, limits: SandboxLimits, *, stdin: str = "", tests: bytes = b""
) -> _Run:
    folder = outer / "work"
    folder.mkdir()
    (folder / "program.py").write_text(program, encoding="utf-8")
    outputs = [outer / name for name in ("stdin", "stdout", "stderr")]
    outputs[0].write_text(stdin, encoding="utf-8")
    with tempfile.TemporaryFile() as report, tempfile.TemporaryFile() as asked:
        asked.write(tests)
        asked.flush()
        settings = {
            "program": "program.py",
            "worker": os.getpid(),
            "report": report.fileno(),
            "tests": asked.fileno(),
            "has_tests": bool(tests),
            "timeout_s": limits.timeout_s,
            "cpu_s": int(limits.timeout_s) + 1,
            "memory_bytes": limits.memory_mib << 20,
            "file_bytes": limits.file_mib << 20,
            "max_processes": limits.max_processes,
            "files_bytes": limits.files_mib << 20,
            "hidden": _hidden(),
            "readable": [*map(os.path.abspath, map(os.path.expanduser, limits.readable))],
            "is_required": limits.namespaces == "required",
        }
        status = _guarded(settings | {"has_mounts": True}, folder, outputs)
        if status == HALF_ENCLOSED:  # a policy of this system refuses mounts that the kernel has
            status = _guarded(settings | {"has_mounts": False}, folder, outputs)
        report.seek(0)
        found = report.read()
    stdout, stderr = (_text(path, limits.output_mib << 20) for path in outputs[1:])
    if status > 0:
        reason = stderr.strip().rpartition("\n")[2]
        raise SandboxError(_REFUSED.get(status) or f"no sandbox could be made: {reason}")
    ended: dict[str, Any] = {"exit_code": None, "said": "", "too_many": False}
    ended |= json.loads(found or b"{}")
    if ended["too_many"]:
        stderr += f"\nended: more than {limits.max_processes} processes and threads\n"
    result = ProgramResult(exit_code=ended["exit_code"], stdout=stdout, stderr=stderr)
    protection = None
    if found:
        protection = SandboxProtection(no_network=ended["is_enclosed"], files=ended["files"])
    return _Run(result=result, said=ended["said"], protection=protection)


def _hidden() -> list[str]:
    """Where secrets are, and what is expected: homes, this working folder, what all write into."""
    found = {os.path.expanduser("~"), *map(str, temporary_directories()), *_SHARED_FOLDERS}
    with contextlib.suppress(FileNotFoundError):  # it was removed
        found.add(os.getcwd())
    with contextlib.suppress(KeyError):  # a user without a name, as containers have them
        found.add(pwd.getpwuid(os.geteuid()).pw_dir)
    never = {os.path.realpath(path) for path in _NEVER_HIDDEN}
    return sorted({os.path.realpath(path) for path in found if os.path.isdir(path)} - never)


def _guarded(settings: dict[str, Any], folder: Path, outputs: Sequence[Path]) -> int:
    """Run the guard to its end; return its exit status, 0 if it has reported."""
    command = [sys.executable, "-I", str(_CHILD), json.dumps(settings)]
    with outputs[0].open("rb") as read, outputs[1].open("wb") as out, outputs[2].open("wb") as err:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env={
                "HOME": str(folder),
                "TMPDIR": str(folder),
                "OMP_NUM_THREADS": "1",
                "OPENBLAS_NUM_THREADS": "1",
            },
            stdin=read,
            stdout=out,
            stderr=err,
            start_new_session=True,
            pass_fds=(settings["report"], settings["tests"]),
        )
        try:
            has_ended = _ends_within(process, settings["timeout_s"] + _GUARD_GRACE_S)
            return process.wait(_GUARD_GRACE_S) if has_ended else 0  # it has reported nothing
        finally:
            _end(process)


def _ends_within(process: "subprocess.Popen[bytes]", longest_s: float) -> bool:
    """Wait for the end of a process, which `Popen.wait` with a limit sees up to 50 ms later."""
    descriptor = os.pidfd_open(process.pid)
    try:
        ends = select.poll()
        ends.register(descriptor, select.POLLIN)
        return bool(ends.poll(longest_s * 1000.0))
    finally:
        os.close(descriptor)


def _end(process: "subprocess.Popen[bytes]") -> None:
    """End the guard, which ends the program, and what is left of its session."""
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_GUARD_GRACE_S)
    with contextlib.suppress(ProcessLookupError):  # all of it has ended
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _text(path: Path, most_bytes: int) -> str:
    with path.open("rb") as output:
        return output.read(most_bytes).decode("utf-8", errors="replace")
