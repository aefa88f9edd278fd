"""What the sandbox of generated programs finds on this machine, and how it runs where less is."""

import ctypes
import dataclasses
import json
import subprocess
import sys

import pytest
from capabilities import needs

from cosmos_rollout import (
    ProgramResult,
    SandboxError,
    SandboxLimits,
    SandboxProtection,
    run_program,
    sandbox_protection,
)
from cosmos_rollout.rewards.sandbox_landlock import has_rules

WITHOUT_NAMESPACES = """
import ctypes, os
user = os.getuid()
assert ctypes.CDLL(None).unshare(0x10000000) == 0  # a name space of users, where none is to be had
open("/proc/self/uid_map", "w").write(f"0 {user} 1")
open("/proc/sys/user/max_user_namespaces", "w").write("0")
"""
WITHOUT_BINDS = """
import ctypes, os, struct
mount = {"x86_64": 165, "aarch64": 40}[os.uname().machine]
lines = [(32, 0, 0, 0), (21, 0, 3, mount), (32, 0, 0, 40), (69, 0, 1, 4096), (6, 0, 0, 0x50001)]
lines.append((6, 0, 0, 0x7FFF0000))  # all else is allowed; EPERM for bind mounts
code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in lines))
libc = ctypes.CDLL(None)
assert libc.prctl(38, 1, 0, 0, 0) == 0
filter = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(lines), ctypes.addressof(code)))
assert libc.prctl(22, 2, filter) == 0
"""
_RUN = """
import dataclasses, json, sys
from cosmos_rollout import SandboxLimits, run_program
result = run_program(sys.argv[1], SandboxLimits(**json.loads(sys.argv[2])))
print(json.dumps(dataclasses.asdict(result)))
"""


def command_without_namespaces(program: str, limits: SandboxLimits) -> list[str]:
    """Return a command that runs a program where the kernel gives no name spaces."""
    return command_of(program, limits, first=WITHOUT_NAMESPACES)


def command_of(
    program: str, limits: SandboxLimits, *, first: str, python: str = sys.executable
) -> list[str]:
    """Return a command that does something and then runs a program, by any Python."""
    return [python, "-c", first + _RUN, program, json.dumps(dataclasses.asdict(limits))]


def run_without_namespaces(program: str, limits: SandboxLimits) -> ProgramResult:
    """Run a program where the kernel gives no name spaces."""
    return result_of(command_without_namespaces(program, limits))


def run_without_binds(program: str, limits: SandboxLimits) -> ProgramResult:
    """Run a program where a policy refuses mounts half-way."""
    return result_of(command_of(program, limits, first=WITHOUT_BINDS))


def result_of(command: list[str]) -> ProgramResult:
    """Return what a command says became of its program."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    return ProgramResult(**json.loads(done.stdout))


def _protection() -> SandboxProtection | None:
    try:
        return sandbox_protection(SandboxLimits(timeout_s=60.0, namespaces="required"))
    except SandboxError:
        return None


_FOUND = _protection()

needs_namespaces = needs("namespaces", _FOUND is not None)
needs_own_files = needs("own-files", _FOUND is not None and _FOUND.files == "own")
needs_rules = needs("landlock", _FOUND is not None and has_rules(ctypes.CDLL(None)))

RUNS = [
    pytest.param(run_program, marks=needs_own_files, id="own"),
    pytest.param(run_without_namespaces, marks=needs_rules, id="rules"),
]
"""How to run a program: with mounts of its own, and with rules alone."""
