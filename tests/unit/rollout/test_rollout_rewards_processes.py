"""Programs that start too many processes, and what becomes of them, with and without name spaces.

Every bomb has a bound of its own, beyond the limit and harmless if the limit did not hold.
"""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from sandboxes import (
    RUNS,
    command_without_namespaces,
    needs_namespaces,
    run_without_namespaces,
)

from cosmos_rollout import SandboxLimits, run_program

FEW = SandboxLimits(timeout_s=60.0, max_processes=8)
WHERE = "import os, time\nprint(os.getcwd(), flush=True)\n"
BOMBS = {
    "one parent": "for _ in range(200):\n    if not os.fork():\n        time.sleep(600)\n",
    "all of them": "for _ in range(8):\n    os.fork()\ntime.sleep(600)\n",
    "orphans": (
        "for _ in range(200):\n"
        "    if not os.fork():\n"
        "        os.setsid()\n"
        "        if os.fork(): os._exit(0)\n"
        "        time.sleep(600)\n"
        "    os.wait()\n"
    ),
    "threads": (
        "import threading\nthreading.stack_size(65536)\n"
        "for _ in range(200): threading.Thread(target=time.sleep, args=(600,)).start()\n"
    ),
}


def processes_in(folder: str) -> list[str]:
    """Return who works in a folder, also one that was removed."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            where = os.readlink(process / "cwd")
        except OSError:
            continue
        if where.removesuffix(" (deleted)") == folder:
            found.append(process.name)
    return found


def printed_in(temporary: Path) -> list[str]:
    """Return the lines that programs print whose sandboxes are in a folder."""
    outputs = temporary.glob("cosmos-sandbox-*/stdout")
    return [line for output in outputs for line in output.read_text().splitlines()]


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_gets_no_more_processes_than_its_limit_and_leaves_none(name):
    result = run_program(WHERE + BOMBS[name], FEW)
    assert result.exit_code != 0
    assert "more than 8 processes" in result.stderr or "Error" in result.stderr
    assert processes_in(result.stdout.strip()) == []


@needs_namespaces
@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_is_found_where_the_kernel_counts_nothing(name):
    result = run_without_namespaces(WHERE + BOMBS[name], FEW)
    assert result.exit_code is None
    assert "ended: more than 8 processes and threads" in result.stderr
    assert processes_in(result.stdout.strip()) == []


@needs_namespaces
def test_the_kernel_refuses_more_where_it_counts_for_the_program_alone():
    program = (
        "import os, time\nchildren = []\n"
        "try:\n"
        "    for _ in range(100):\n"
        "        child = os.fork()\n"
        "        if not child: time.sleep(600)\n"
        "        children.append(child)\n"
        "except BlockingIOError:\n"
        "    print(len(children))\n"
    )
    kernel = tuple(int(number) for number in os.uname().release.split(".")[:2])
    if os.geteuid() == 0 or kernel >= (5, 14):
        assert run_program(program, FEW).stdout == "7\n"


@pytest.mark.parametrize("run", RUNS)
def test_a_session_of_its_own_does_not_outlive_a_program(run):
    program = WHERE + (
        "if not os.fork():\n    os.setsid()\n    if not os.fork():\n        time.sleep(600)\n"
        "time.sleep(0.5)\n"
    )
    result = run(program, FEW)
    assert result.exit_code == 0
    assert processes_in(result.stdout.strip()) == []


@needs_namespaces
@pytest.mark.parametrize("inside", [True, False], ids=["namespaces", "none"])
def test_nothing_is_left_of_a_program_whose_worker_is_killed(tmp_path, monkeypatch, inside):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    program = (
        "import os, time\nif not os.fork(): os.setsid()\nprint(os.getcwd(), flush=True)\n"
        "time.sleep(600)\n"
    )
    code = "import sys; from cosmos_rollout import *; run_program(sys.argv[1], "
    code += "SandboxLimits(timeout_s=600.0))"
    command = [sys.executable, "-c", code, program]
    limits = SandboxLimits(timeout_s=600.0)
    with subprocess.Popen(
        command if inside else command_without_namespaces(program, limits)
    ) as worker:
        try:
            while len(folders := printed_in(tmp_path)) < 2:
                assert worker.poll() is None
                time.sleep(0.02)
            assert len(processes_in(folders[0])) >= 2
        finally:
            worker.kill()
    deadline = time.monotonic() + 60.0
    while [*tmp_path.iterdir(), *processes_in(folders[0])] and time.monotonic() < deadline:
        time.sleep(0.02)
    assert [*tmp_path.iterdir(), *processes_in(folders[0])] == []
