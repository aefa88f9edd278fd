"""Programs that start too many processes, and what becomes of them, with and without name spaces.

Every bomb has a bound of its own, beyond the limit and harmless if the limit did not hold.
"""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from sandboxes import needs_namespaces

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
WITHOUT_NAMESPACES = """
import ctypes, os, sys
user = os.getuid()
assert ctypes.CDLL(None).unshare(0x10000000) == 0  # a name space of users, where none is to be had
open("/proc/self/uid_map", "w").write(f"0 {user} 1")
open("/proc/sys/user/max_user_namespaces", "w").write("0")
from cosmos_rollout import SandboxError, SandboxLimits, run_program
limits = SandboxLimits(timeout_s=float(sys.argv[2]), max_processes=8)
try:
    run_program("pass", SandboxLimits(timeout_s=60.0, namespaces="required"))
except SandboxError:
    result = run_program(sys.argv[1], limits)
    print(result.exit_code, result.stdout, result.stderr, sep="\\n")
"""


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


def run_without_namespaces(program: str, timeout_s: float) -> list[str]:
    """Return exit code, folder and the lines of complaint."""
    command = [sys.executable, "-c", WITHOUT_NAMESPACES, program, str(timeout_s)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    return done.stdout.splitlines()


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_gets_no_more_processes_than_its_limit_and_leaves_none(name):
    result = run_program(WHERE + BOMBS[name], FEW)
    assert result.exit_code != 0
    assert "more than 8 processes" in result.stderr or "Error" in result.stderr
    assert processes_in(result.stdout.strip()) == []


@needs_namespaces
@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_is_found_where_the_kernel_counts_nothing(name):
    exit_code, folder, *complaints = run_without_namespaces(WHERE + BOMBS[name], 60.0)
    assert exit_code == "None"
    assert "ended: more than 8 processes and threads" in complaints
    assert processes_in(folder) == []


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


@needs_namespaces
def test_a_session_of_its_own_does_not_outlive_a_program_without_name_spaces():
    program = WHERE + (
        "if not os.fork():\n    os.setsid()\n    if not os.fork():\n        time.sleep(600)\n"
        "time.sleep(0.5)\n"
    )
    exit_code, folder, *_ = run_without_namespaces(program, 60.0)
    assert exit_code == "0"
    assert processes_in(folder) == []


@needs_namespaces
@pytest.mark.parametrize("inside", [True, False], ids=["namespaces", "none"])
def test_all_ends_with_the_worker_that_is_killed(tmp_path, inside):
    mark = tmp_path / "where"
    program = (
        f"import os, time\nif not os.fork(): os.setsid()\n"
        f"open({str(mark)!r}, 'a').write(os.getcwd() + '\\n')\ntime.sleep(600)\n"
    )
    code = "import sys; from cosmos_rollout import *; run_program(sys.argv[1], "
    code += "SandboxLimits(timeout_s=600.0))"
    command = [sys.executable, "-c", code if inside else WITHOUT_NAMESPACES, program, "600"]
    with subprocess.Popen(command) as worker:
        try:
            while not mark.exists() or len(mark.read_text().splitlines()) < 2:
                assert worker.poll() is None
                time.sleep(0.02)
        finally:
            worker.kill()
    folder = mark.read_text().splitlines()[0]
    deadline = time.monotonic() + 60.0
    while processes_in(folder) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert processes_in(folder) == []
