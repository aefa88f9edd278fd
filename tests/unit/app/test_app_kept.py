"""What keeps a replica of a cluster's job alive: restarts, refusals, and a signal that ends it."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from processes import is_alive

_LONG_S = 120.0


def kept(
    tmp_path: Path, code: str, *, restarts: int, suspended_s: float = _LONG_S
) -> subprocess.Popen[str]:
    """Start a program that notes each of its starts."""
    noting = "import os, pathlib, sys, time\nopen('starts', 'a').write(f'{os.getpid()}\\n')\n"
    command = [sys.executable, "-m", "cosmos_app.kept", "rollout-3", str(restarts)]
    return subprocess.Popen(
        [*command, sys.executable, "-c", noting + code],
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "COSMOS_SUSPENDED_S": str(suspended_s)},
    )


def starts(tmp_path: Path) -> list[int]:
    path = tmp_path / "starts"
    return [int(line) for line in path.read_text().splitlines()] if path.exists() else []


def await_start(tmp_path: Path) -> int:
    deadline = time.monotonic() + _LONG_S
    while not starts(tmp_path):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return starts(tmp_path)[0]


def test_a_process_that_dies_is_started_again_until_it_finishes(tmp_path: Path) -> None:
    code = "sys.exit(0 if len(open('starts').readlines()) == 2 else 7)"
    running = kept(tmp_path, code, restarts=3)
    _, errors = running.communicate(timeout=_LONG_S)
    assert running.returncode == 0, errors
    assert len(starts(tmp_path)) == 2
    said = "rollout-3 died: exit code 7; it is started again in 0.5 s, 2 more times after that\n"
    assert errors == said


def test_a_process_that_is_suspended_has_died(tmp_path: Path) -> None:
    code = "time.sleep(0 if len(open('starts').readlines()) == 2 else 600)"
    running = kept(tmp_path, code, restarts=3, suspended_s=2.0)
    os.kill(await_start(tmp_path), signal.SIGSTOP)
    _, errors = running.communicate(timeout=_LONG_S)
    assert running.returncode == 0, errors
    assert len(starts(tmp_path)) == 2
    assert errors.splitlines()[0] == "rollout-3 is suspended, for 2 s: it is killed"
    assert "rollout-3 died: signal 9 (SIGKILL); it is started again" in errors


def test_a_process_is_given_up_with_the_code_of_its_last_death(tmp_path: Path) -> None:
    running = kept(tmp_path, "os.kill(os.getpid(), 9)", restarts=1)
    _, errors = running.communicate(timeout=_LONG_S)
    assert running.returncode == 128 + 9
    assert len(starts(tmp_path)) == 2
    assert errors.endswith(
        "rollout-3 died: signal 9 (SIGKILL); it was started again 1 times (launch.restarts) and "
        "is given up\n"
    )


def test_a_process_that_refuses_is_not_asked_again(tmp_path: Path) -> None:
    running = kept(tmp_path, "sys.exit(2)", restarts=3)
    _, errors = running.communicate(timeout=_LONG_S)
    assert running.returncode == 2
    assert len(starts(tmp_path)) == 1
    assert "it cannot do what it was asked to" in errors


def test_sigterm_ends_the_process_for_good(tmp_path: Path) -> None:
    running = kept(tmp_path, "time.sleep(600)", restarts=3)
    process = await_start(tmp_path)
    running.send_signal(signal.SIGTERM)
    _, errors = running.communicate(timeout=_LONG_S)
    assert (running.returncode, errors) == (128 + 15, "")
    assert starts(tmp_path) == [process]
    assert not Path(f"/proc/{process}").exists()


def test_what_a_dead_process_leaves_behind_is_ended(tmp_path: Path) -> None:
    code = (
        "import subprocess\n"
        "left = subprocess.Popen(['sleep', '600'])\n"
        "pathlib.Path('left').write_text(str(left.pid))\n"
        "sys.exit(2)"
    )
    running = kept(tmp_path, code, restarts=0)
    running.communicate(timeout=_LONG_S)
    left = int((tmp_path / "left").read_text())
    deadline = time.monotonic() + _LONG_S
    while is_alive(left):
        assert time.monotonic() < deadline
        time.sleep(0.05)
