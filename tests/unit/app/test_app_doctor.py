"""``cosmos-app doctor``: what it finds here, and what it says of a machine that takes no run."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from click.testing import CliRunner

pytest.importorskip("cosmos_rollout")
from cosmos_app.cli import main
from cosmos_app.doctor import look_at_compilers, look_at_disk

_LOOKED_AT = [
    "python", "cosmos", "memory", "disk", "shared memory", "temporary files",
    "torch", "vllm", "compilers", "copies", "redis", "sandbox",
]  # fmt: skip

# Where every write to a file fails, as on a full disk, whoever the user is.
_FULL = """
import resource
from cosmos_app.cli import main
resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
main(["doctor", "--json"])
"""

# A directory of somebody else's, if need be to a user who is not root.
_THEIRS = """
import os, sys
from cosmos_app.doctor import look_at_disk
os.chdir(sys.argv[1])
if os.geteuid() == 0:
    os.setuid(65534)
print(look_at_disk())
"""


def examined(**environment: str | None) -> tuple[int, dict[str, dict[str, str]]]:
    """Return the exit code, and what was found by its name."""
    result = CliRunner().invoke(main, ["doctor", "--json"], env=environment)
    return result.exit_code, by_name(result.stdout)


def by_name(said: str) -> dict[str, dict[str, str]]:
    return {finding["name"]: finding for finding in json.loads(said)}


def python(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", script, *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_everything_is_looked_at_and_what_is_not_as_it_should_be_has_advice() -> None:
    code, found = examined()
    assert list(found) == _LOOKED_AT
    assert {finding["state"] for finding in found.values()} <= {"ok", "warning", "problem"}
    assert all(finding["found"] for finding in found.values())
    assert [name for name, of in found.items() if (of["state"] == "ok") == bool(of["advice"])] == []
    assert code == int(any(finding["state"] == "problem" for finding in found.values()))
    assert found["redis"]["state"] == "ok"


def test_a_person_is_shown_a_table_of_the_same() -> None:
    result = CliRunner().invoke(main, ["doctor"])
    assert [name for name in _LOOKED_AT if f"{name} " not in result.stdout] == []
    assert "what to do" in result.stdout


def test_a_machine_without_compilers_is_told_to_install_them(tmp_path: Path) -> None:
    code, found = examined(PATH=str(tmp_path), CC=None, CXX=None)
    finding = found["compilers"]
    assert finding["found"] == "no gcc or clang, no g++"
    assert finding["advice"].startswith("install gcc and g++, or name others by CC and CXX")
    assert finding["state"] in {"warning", "problem"}
    assert code >= int(finding["state"] == "problem")


def test_compilers_are_missed_where_there_is_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU nothing is compiled unless a recipe says so."""
    monkeypatch.setenv("PATH", str(tmp_path))
    for name in ("CC", "CXX"):
        monkeypatch.delenv(name, raising=False)
    assert look_at_compilers(lambda: False).state == "warning"
    assert look_at_compilers(lambda: True).state == "problem"


def test_a_run_needs_both_compilers_and_takes_those_of_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("clang", "mine++"):
        (tmp_path / name).write_text("")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("CXX", "other++")
    assert look_at_compilers(lambda: False).found == "no other++"
    monkeypatch.setenv("CXX", "mine++")
    assert look_at_compilers(lambda: True).state == "ok"


def test_a_machine_that_can_write_no_temporary_file_is_told_what_to_set() -> None:
    done = python(_FULL)
    assert done.stderr == ""
    assert done.returncode == 1
    found = by_name(done.stdout)
    assert list(found) == _LOOKED_AT[: _LOOKED_AT.index("temporary files") + 1]
    assert found["temporary files"]["state"] == "problem"
    assert "set TMPDIR to a directory that can be written" in found["temporary files"]["advice"]


def test_a_directory_that_takes_no_run_is_named_with_what_to_do() -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        Path(folder).chmod(0o555)
        said = python(_THEIRS, folder).stdout
    assert "state='warning'" in said
    assert f"{folder} cannot be written" in said
    assert "choose output=DIR elsewhere" in said


def test_a_directory_that_was_removed_is_a_problem_not_a_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    finding = look_at_disk()
    assert finding.state == "problem"
    assert finding.advice == "change to a directory that is there"
