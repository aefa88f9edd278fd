"""A run directory that two machines share: namespaces of Linux with host names of their own."""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from capabilities import skip_without

from cosmos_core.rundir import RunDirectory, RunInUseError

_THERE = ["unshare", "--user", "--map-root-user", "--uts", "--mount", "--pid", "--fork"]
_HOLD = """
import os, sys, time
from pathlib import Path
from cosmos_core.rundir import RunDirectory
run = RunDirectory.create(Path(sys.argv[1]), config_json="{}", now_s=1.0)
print(os.getpid(), flush=True)
time.sleep(600)
"""


def on_machine(name: str, *command: str) -> list[str]:
    """Return a command as it is to be run on a machine of a name."""
    return [*_THERE, "--kill-child", "sh", "-c", f'hostname {name}; exec "$@"', "sh", *command]


def why_not() -> str:
    """Say why no such machine can be had here; nothing if one can."""
    if missing := [tool for tool in ("unshare", "hostname") if shutil.which(tool) is None]:
        return f"namespaces want {', '.join(missing)}"
    done = subprocess.run(on_machine("other", "true"), capture_output=True, text=True, check=False)
    return done.stderr


def test_a_run_of_another_machine_is_left_to_it_until_that_one_dies(tmp_path: Path) -> None:
    if reason := why_not():
        skip_without("namespaces", reason)
    command = on_machine("gpu-7", sys.executable, "-c", _HOLD, str(tmp_path / "run"))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True) as there:
        assert there.stdout is not None
        try:
            pid = int(there.stdout.readline())  # its number there, which is another's here
            with pytest.raises(RunInUseError, match=f"by process {pid} on gpu-7 since 20") as told:
                RunDirectory.resume(tmp_path / "run")
            assert told.value.holder == RunDirectory.open(tmp_path / "run").holder()
        finally:
            there.kill()
    deadline = time.monotonic() + 30.0
    while RunDirectory.open(tmp_path / "run").holder() and time.monotonic() < deadline:
        time.sleep(0.01)
    RunDirectory.resume(tmp_path / "run").close()
