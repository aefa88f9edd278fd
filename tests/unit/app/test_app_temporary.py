"""A run's own temporary directory."""

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from cosmos_app.temporary import own_temporary_directory

KILLED = """
import os, pathlib, signal, subprocess, sys
from cosmos_app.temporary import own_temporary_directory
with own_temporary_directory(pathlib.Path(sys.argv[1])):
    leave = "import tempfile; print(tempfile.mkdtemp(prefix='left-'))"
    subprocess.run([sys.executable, "-c", leave], check=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


PASSES = """
import pathlib, sys
from cosmos_app.temporary import own_temporary_directory
with own_temporary_directory(pathlib.Path(sys.argv[1])):
    pass
"""


@pytest.fixture
def machines(monkeypatch):
    with tempfile.TemporaryDirectory(prefix="m-", dir="/tmp") as folder:
        monkeypatch.setenv("TMPDIR", folder)
        monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)  # torch sets it as it likes
        yield Path(folder)


def run(program: str, machines: Path) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(path for path in sys.path if path)
    environment = {**os.environ, "PYTHONPATH": path}
    return subprocess.run(
        [sys.executable, "-c", program, str(machines)],
        env=environment,
        text=True,
        capture_output=True,
        check=False,
    )


def test_what_processes_leave_goes_with_the_run(machines) -> None:
    with own_temporary_directory(machines):
        own = Path(os.environ["TMPDIR"])
        assert own.parent == machines
        said = run("import tempfile; print(tempfile.mkdtemp())", machines)
        assert Path(said.stdout.strip()).parent == own
        assert os.environ["TORCHINDUCTOR_CACHE_DIR"].startswith(f"{machines}/torchinductor_")
    assert list(machines.iterdir()) == []
    assert os.environ["TMPDIR"] == str(machines)
    assert "TORCHINDUCTOR_CACHE_DIR" not in os.environ


def test_what_a_killed_launcher_left_goes_with_the_next_run_and_a_live_one_keeps_its_own(
    machines,
) -> None:
    with own_temporary_directory(machines):
        own = Path(os.environ["TMPDIR"])
        killed = run(KILLED, machines)
        assert killed.returncode == -signal.SIGKILL
        left = Path(killed.stdout.strip())
        assert left.is_dir()
        assert left.parent != own
        again = run(PASSES, machines)
        assert again.returncode == 0, again.stderr
        assert list(machines.iterdir()) == [own]
        assert own.is_dir()


def test_a_directory_too_long_for_sockets_is_not_used(machines) -> None:
    long = machines / ("x" * 50)
    long.mkdir()
    with own_temporary_directory(long):
        assert os.environ["TMPDIR"] == str(machines)
    assert list(long.iterdir()) == []
