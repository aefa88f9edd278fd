"""Which temporary directories a process has."""

import subprocess
import sys

import pytest

PROGRAM = "from cosmos_core.temporary import temporary_directories as d; print(*d())"


@pytest.mark.parametrize("name", ["cosmos-run-1", "other"])
def test_of_a_runs_own_directory_the_machines_is_named_too(
    tmp_path, name, child_environment
) -> None:
    own = tmp_path / name
    own.mkdir()
    said = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**child_environment, "TMPDIR": str(own)},
        text=True,
        capture_output=True,
        check=True,
    )
    assert said.stdout.split() == ([str(own), str(tmp_path)] if "run" in name else [str(own)])
