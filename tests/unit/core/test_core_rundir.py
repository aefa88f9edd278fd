"""The directory of a run: who may have it, and what a crash leaves."""

import os
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cosmos_core.rundir import (
    NotARunDirectoryError,
    RunDirectory,
    RunExistsError,
    RunInUseError,
    RunNotWritableError,
    latest_run,
    write_atomic,
)

_HOLD = """
import sys, time
from pathlib import Path
from cosmos_core.rundir import RunDirectory
run = RunDirectory.create(Path(sys.argv[1]), config_json="{}", now_s=1.0)
sys.stdout.write("held\\n")
sys.stdout.flush()
time.sleep(60)
"""


def make(path: Path, now_s: float = 1.0) -> RunDirectory:
    return RunDirectory.create(path, config_json='{"seed": 3}', now_s=now_s)


def test_a_new_run_has_its_folders_and_its_config(tmp_path: Path):
    with make(tmp_path / "runs" / "one") as run:
        assert run.name == "one"
        assert run.config.read_text() == '{"seed": 3}'
        assert all(folder.is_dir() for folder in (run.logs, run.checkpoints, run.export, run.redis))
        assert run.metrics.parent == run.report.parent == run.path


def test_a_stopped_run_is_resumed_but_not_overwritten(tmp_path: Path):
    make(tmp_path / "one").close()
    with pytest.raises(RunExistsError, match="--resume"):
        make(tmp_path / "one")
    with RunDirectory.resume(tmp_path / "one") as run:
        assert run.created_s == 1.0


def test_an_empty_directory_will_do(tmp_path: Path):
    make(tmp_path).close()


def test_files_that_are_not_ours_are_left_alone(tmp_path: Path):
    (tmp_path / "thesis.tex").write_text("\\begin{document}")
    with pytest.raises(RunExistsError, match=r"it holds thesis\.tex"):
        make(tmp_path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize("where", ["file/run", "/proc/run"])
def test_where_nothing_can_be_written_no_run_begins(tmp_path: Path, where):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunNotWritableError, match="run cannot be the directory of a run: N"):
        make(tmp_path / where)


def test_a_file_is_not_a_directory(tmp_path: Path):
    (tmp_path / "run").write_text("")
    with pytest.raises(RunExistsError, match="is a file"):
        make(tmp_path / "run")


@pytest.mark.parametrize("look", [RunDirectory.resume, RunDirectory.open])
def test_what_is_not_a_run_is_not_resumed(tmp_path: Path, look):
    with pytest.raises(NotARunDirectoryError, match=r"no run\.json"):
        look(tmp_path)


def test_a_damaged_marker_is_reported(tmp_path: Path):
    make(tmp_path / "one").close()
    (tmp_path / "one" / "run.json").write_text('{"format": 1')
    with pytest.raises(NotARunDirectoryError, match="damaged"):
        RunDirectory.resume(tmp_path / "one")


def content_of(path: Path) -> dict[Path, tuple[bytes, int]]:
    """Return what files there have, and when they were written."""
    files = [file for file in path.rglob("*") if file.is_file()]
    return {file: (file.read_bytes(), file.stat().st_mtime_ns) for file in files}


def test_a_live_process_keeps_others_out_until_it_is_killed(tmp_path: Path, child_environment):
    holder = subprocess.Popen(
        [sys.executable, "-c", _HOLD, str(tmp_path / "one")],
        stdout=subprocess.PIPE,
        env=child_environment,
        start_new_session=True,
    )
    assert holder.stdout is not None
    try:
        assert holder.stdout.readline() == b"held\n"
        before = content_of(tmp_path / "one")
        for take in (make, RunDirectory.resume):
            who = f"in use by process {holder.pid} on {socket.gethostname()} since 20"
            with pytest.raises(RunInUseError, match=who) as caught:
                take(tmp_path / "one")
            assert caught.value.holder.pid == holder.pid
            assert 0.0 <= time.time() - caught.value.holder.since_s < 60.0
        assert content_of(tmp_path / "one") == before
        assert RunDirectory.open(tmp_path / "one").created_s == 1.0
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.wait(10)
        holder.stdout.close()
    RunDirectory.resume(tmp_path / "one").close()


def test_a_world_models_output_is_said_to_have_no_controller(tmp_path: Path):
    (tmp_path / "metrics.jsonl").write_text("{}")
    with pytest.raises(NotARunDirectoryError, match=r"of a world model, wrote .*metrics\.jsonl"):
        RunDirectory.open(tmp_path)


def test_the_latest_run_is_the_one_created_last(tmp_path: Path):
    make(tmp_path / "b", now_s=5.0).close()
    make(tmp_path / "a", now_s=7.0).close()
    (tmp_path / "c").mkdir()
    assert latest_run(tmp_path) == tmp_path / "a"


def test_no_run_at_all_is_said(tmp_path: Path):
    with pytest.raises(NotARunDirectoryError, match="no run under"):
        latest_run(tmp_path / "runs")


def test_an_atomic_write_replaces_the_whole_file_and_leaves_nothing_else(tmp_path: Path):
    target = tmp_path / "report.md"
    write_atomic(target, "a long first version")
    write_atomic(target, b"short")
    assert target.read_bytes() == b"short"
    assert [entry.name for entry in tmp_path.iterdir()] == ["report.md"]


@pytest.mark.parametrize(("umask", "found"), [(0o022, 0o644), (0o002, 0o664), (0o077, 0o600)])
def test_an_atomic_write_has_the_mode_that_is_asked_for_less_the_umask(
    tmp_path: Path, umask: int, found: int
):
    before = os.umask(umask)
    try:
        write_atomic(tmp_path / "report.md", "text")
        write_atomic(tmp_path / "token", "text", mode=0o600)
    finally:
        os.umask(before)
    assert (tmp_path / "report.md").stat().st_mode & 0o777 == found
    assert (tmp_path / "token").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("left", [["lock"], ["lock", "logs", "redis", ".config.json.1a2b"]])
def test_what_a_run_left_that_died_as_it_was_made_is_in_nobodys_way(tmp_path: Path, left):
    for name in left:
        (tmp_path / name).mkdir() if name in {"logs", "redis"} else (tmp_path / name).touch()
    make(tmp_path).close()


def test_a_folder_of_ours_with_something_in_it_is_not_taken(tmp_path: Path):
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "best.pt").touch()
    with pytest.raises(RunExistsError, match="it holds checkpoints"):
        make(tmp_path)


def test_several_processes_that_make_one_directory_at_once_make_one_run(tmp_path: Path):
    def try_it(_: int) -> RunDirectory | None:
        try:
            return make(tmp_path / "one")
        except RunInUseError:
            return None

    with ThreadPoolExecutor(8) as pool:
        (made,) = [run for run in pool.map(try_it, range(8)) if run is not None]
    made.close()


def test_who_holds_a_run_is_known_to_others(tmp_path: Path):
    with make(tmp_path / "one"):
        holder = RunDirectory.open(tmp_path / "one").holder()
        assert holder is not None
        assert holder.pid == os.getpid()
    assert RunDirectory.open(tmp_path / "one").holder() is None


@pytest.mark.parametrize(
    ("left", "said"),
    [
        ("", "another process"),
        ("12\n", r"process 12 since 20\d\d-"),
        ("12 m\n", "process 12 on m "),
    ],
)
def test_a_holder_that_has_not_said_all_of_itself_is_told_as_far_as_it_has(
    tmp_path: Path, left: str, said: str
):
    """It is about to, or of a release that had less to say."""
    with make(tmp_path / "one"):
        (tmp_path / "one" / "lock").write_text(left)
        with pytest.raises(RunInUseError, match=f"is in use by {said}"):
            RunDirectory.resume(tmp_path / "one")


def test_an_atomic_write_that_fails_leaves_the_old_file(tmp_path: Path):
    target = tmp_path / "report.md"
    target.mkdir()
    with pytest.raises(OSError, match=r"report\.md"):
        write_atomic(target, "text")
    assert [entry.name for entry in tmp_path.iterdir()] == ["report.md"]
