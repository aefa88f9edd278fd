"""Children are kept alive, given up on, and taken down with everything they started."""

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from processes import is_alive
from supervised import child, ignore

from cosmos_app.errors import ChildFailedError, ChildRefusedError
from cosmos_app.parent import PARENT
from cosmos_app.supervisor import (
    ChildSpec,
    Incident,
    Restarts,
    Supervisor,
    describe_exit,
    log_tail,
)


def _spec(tmp_path: Path, code: str, *, restarts: int = 0, name: str = "child") -> ChildSpec:
    return child(tmp_path, name, code, restarts=restarts)


async def _until(condition: Callable[[], bool], deadline_s: float = 20.0) -> None:
    deadline = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


async def test_a_child_that_exits_with_zero_has_finished(tmp_path: Path) -> None:
    supervisor = Supervisor(ignore)
    supervisor.start(_spec(tmp_path, "pass"))
    await supervisor.wait(["child"])
    assert supervisor.incidents == []


async def test_a_child_that_refuses_its_recipe_is_not_asked_again(tmp_path: Path) -> None:
    supervisor = Supervisor(ignore)
    code = "import sys; print('no such model'); sys.exit(2)"
    supervisor.start(_spec(tmp_path, code, restarts=5))
    with pytest.raises(ChildRefusedError, match="no such model"):
        await supervisor.wait(["child"])
    assert [incident.outcome for incident in supervisor.incidents] == ["gave up"]


def test_torchrun_passes_a_refusal_of_its_ranks_on(tmp_path: Path) -> None:
    script = tmp_path / "refuse.py"
    script.write_text("import sys; sys.exit(2)")
    command = [sys.executable, "-m", "cosmos_app.torchrun", "--standalone", str(script)]
    ended = subprocess.run(command, capture_output=True, timeout=240, check=False)
    assert ended.returncode == 2, ended.stderr


def test_what_a_rank_said_is_at_the_end_of_the_log_of_torchrun(tmp_path: Path) -> None:
    (tmp_path / "die.py").write_text("import sys; sys.exit('no such model')")
    argv = [sys.executable, "-m", "cosmos_app.torchrun", "--standalone", "--nproc-per-node=2"]
    with (tmp_path / "log").open("wb") as log:
        ended = subprocess.run(
            [*argv, str(tmp_path / "die.py")], stderr=log, timeout=240, check=False
        )
    assert ended.returncode == 1
    *_, last = log_tail(tmp_path / "log").splitlines()
    assert "no such model" in log_tail(tmp_path / "log")
    assert re.fullmatch(r"rank [01] \(pid \d+\) ended first: exit code 1", last)


def test_torchrun_ends_ranks_that_are_suspended_where_no_launcher_sees_them(
    tmp_path: Path,
) -> None:
    script = tmp_path / "rank.py"
    script.write_text(
        "import os, signal, time\n"
        "os.kill(os.getpid(), signal.SIGSTOP) if os.environ['RANK'] == '1' else time.sleep(600)\n"
    )
    argv = [sys.executable, "-m", "cosmos_app.torchrun", "--standalone", "--nproc-per-node=2"]
    environment = {**os.environ, "COSMOS_SUSPENDED_S": "2"}
    environment.pop(PARENT, None)
    ended = subprocess.run(
        [*argv, str(script)], env=environment, capture_output=True, text=True, timeout=240
    )
    assert ended.returncode == 1
    said = re.search(
        r"rank 1 \(process (\d+)\) is suspended, for 2 s: it is killed\n", ended.stderr
    )
    assert said, ended.stderr
    assert f"rank 1 (pid {said[1]}) ended first: signal 9 (SIGKILL)" in ended.stderr


def test_torchrun_asks_its_ranks_to_stop_and_ends_as_by_the_signal(tmp_path: Path) -> None:
    script = tmp_path / "asked.py"
    script.write_text(
        "import signal, sys, time\n"
        "from pathlib import Path\n"
        "here = Path(sys.argv[0]).parent\n"
        "signal.signal(signal.SIGINT, lambda *_: (here / 'saved').touch() or sys.exit(3))\n"
        "(here / 'up').touch()\n"
        "time.sleep(200)\n"
    )
    command = [sys.executable, "-m", "cosmos_app.torchrun", "--standalone", str(script)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as torchrun:
        end = time.monotonic() + 240
        while not (tmp_path / "up").exists() and time.monotonic() < end:
            time.sleep(0.05)
        torchrun.send_signal(signal.SIGINT)
        _, said = torchrun.communicate(timeout=120)
    assert torchrun.returncode == 128 + signal.SIGINT, said
    assert (tmp_path / "saved").exists()
    assert "Traceback" not in said


def test_a_second_ctrl_c_ends_ranks_that_hang_in_seconds(tmp_path: Path) -> None:
    script = tmp_path / "hung.py"
    script.write_text(
        "import os, signal, sys, time\n"
        "from pathlib import Path\n"
        "for each in (signal.SIGINT, signal.SIGTERM):\n"
        "    signal.signal(each, lambda *_: None)\n"
        "(Path(sys.argv[0]).parent / os.environ['RANK']).touch()\n"
        "while True:\n"
        "    time.sleep(1)\n"
    )
    command = [sys.executable, "-m", "cosmos_app.torchrun", "--standalone", "--nproc-per-node=2"]
    with subprocess.Popen([*command, str(script)], stderr=subprocess.PIPE, text=True) as torchrun:
        end = time.monotonic() + 240
        while not all((tmp_path / rank).exists() for rank in "01") and time.monotonic() < end:
            time.sleep(0.05)
        torchrun.send_signal(signal.SIGINT)
        time.sleep(2.0)
        torchrun.send_signal(signal.SIGINT)
        pressed = time.monotonic()
        _, said = torchrun.communicate(timeout=120)
    assert time.monotonic() - pressed < 40, said
    assert torchrun.returncode > 0
    assert re.search(r"waiting for rank 0 \(process \d+\), rank 1 \(process \d+\), 36\d\d s", said)
    assert re.search(r"rank 1 \(process \d+\) are killed in 5 s", said)


@pytest.mark.parametrize(("set_to", "waits_s"), [(None, 3600), ("45", 45)])
def test_torchrun_gives_ranks_time_to_end_their_step(set_to: str | None, waits_s: int) -> None:
    """Of its own it kills 30 s after Ctrl-C."""
    code = (
        "import sys; from cosmos_app.torchrun import main\n"
        "sys.argv = ['torchrun', '--help']\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        "from torch.distributed.launcher.api import LaunchConfig\n"
        "print(LaunchConfig(min_nodes=1, max_nodes=1, nproc_per_node=1).shutdown_timeout)"
    )
    given = {} if set_to is None else {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": set_to}
    ended = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **given},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert ended.stdout.splitlines()[-1] == str(waits_s), ended.stderr


async def test_a_child_that_dies_is_restarted_then_given_up_with_its_log(tmp_path: Path) -> None:
    supervisor = Supervisor(ignore)
    supervisor.start(_spec(tmp_path, "import sys; sys.exit('no such model')", restarts=1))
    with pytest.raises(ChildFailedError, match="no such model"):
        await supervisor.wait(["child"])
    assert [incident.outcome for incident in supervisor.incidents] == ["restarted", "gave up"]
    assert supervisor.incidents[0].how == "exit code 1"


def test_pauses_between_restarts_grow_until_a_child_has_lived_for_a_while() -> None:
    restarts = Restarts(100)
    pauses = [restarts.pause_after(1, lived_s) for lived_s in (0.1, 0.1, 0.1, 29.0, 600.0, 0.1)]
    assert pauses == [0.5, 1.0, 2.0, 4.0, 0.5, 1.0]
    assert [restarts.pause_after(1, 0.1) for _ in range(20)][-1] == 30.0


def test_a_process_that_has_lived_for_an_hour_has_all_its_restarts_again() -> None:
    restarts = Restarts(2)
    assert [restarts.pause_after(1, 3599.0) for _ in range(3)] == [0.5, 0.5, None]
    restarts = Restarts(2)
    assert [restarts.pause_after(1, 3600.0) for _ in range(50)] == [0.5] * 50
    assert restarts.left == 1
    none = Restarts(0)
    assert none.pause_after(1, 7200.0) is None


async def test_a_child_that_dies_now_and_then_is_always_started_again(tmp_path: Path) -> None:
    """Three deaths in days are no reason to end a run."""
    mark = tmp_path / "lives"
    code = (
        f"import pathlib, sys, time; p = pathlib.Path({str(mark)!r}); "
        "n = len(p.read_text()) if p.exists() else 0; "
        "p.write_text('x' * (n + 1)); time.sleep(0.4); sys.exit(0 if n == 3 else 1)"
    )
    spec = replace(_spec(tmp_path, code, restarts=1), forgiven_s=0.3)
    supervisor = Supervisor(ignore)
    supervisor.start(spec)
    await supervisor.wait([spec.name])
    assert mark.read_text() == "xxxx"
    assert [incident.outcome for incident in supervisor.incidents] == ["restarted"] * 3


def test_a_refusal_uses_up_no_restart_and_gets_none() -> None:
    restarts = Restarts(1)
    assert restarts.pause_after(2, 0.1) is None
    assert restarts.pause_after(1, 0.1) == 0.5
    assert restarts.pause_after(1, 0.1) is None


async def test_a_killed_child_is_reported_with_its_signal_and_comes_back(tmp_path: Path) -> None:
    seen: list[Incident] = []

    async def note(incident: Incident) -> None:
        seen.append(incident)

    flag = tmp_path / "second-time"
    code = (
        f"import pathlib, time; f = pathlib.Path({str(flag)!r})\n"
        "if not f.exists():\n    f.touch(); time.sleep(60)"
    )
    supervisor = Supervisor(note)
    supervisor.start(_spec(tmp_path, code, restarts=1))
    await _until(flag.exists)
    pid = supervisor.pid("child")
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    await supervisor.wait(["child"])
    assert [(incident.pid, incident.how) for incident in seen] == [(pid, "signal 9 (SIGKILL)")]


async def test_stop_takes_grandchildren_down_thatignore_sigterm(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    grandchild = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"
    )
    code = (
        "import pathlib, subprocess, sys, time\n"
        f"child = subprocess.Popen([sys.executable, '-c', {grandchild!r}])\n"
        f"path = pathlib.Path({str(pid_file)!r})\n"
        "partial = path.with_suffix('.tmp')\n"
        "partial.write_text(str(child.pid)); partial.rename(path)\n"
        "time.sleep(60)"
    )
    supervisor = Supervisor(ignore)
    supervisor.start(_spec(tmp_path, code))
    await _until(pid_file.exists)
    await supervisor.stop(grace_s=5.0)
    await _until(lambda: not is_alive(int(pid_file.read_text())))


def test_how_a_process_ended_is_said_in_words() -> None:
    assert describe_exit(-9) == "signal 9 (SIGKILL)"
    assert describe_exit(3) == "exit code 3"


async def test_a_recycled_child_begins_anew_and_that_is_no_incident(tmp_path: Path) -> None:
    flag = tmp_path / "second-time"
    code = (
        f"import pathlib, time; f = pathlib.Path({str(flag)!r})\n"
        "if not f.exists():\n    f.touch(); time.sleep(60)"
    )
    supervisor = Supervisor(ignore)
    supervisor.start(_spec(tmp_path, code, restarts=0))
    await _until(flag.exists)
    assert supervisor.recycle("child")
    await supervisor.wait(["child"])
    assert supervisor.incidents == []
    assert not supervisor.recycle("child"), "it has ended"


_DIES = "open('{starts}', 'a').write('x'); import sys; sys.exit(1)"


async def test_a_child_that_is_dismissed_between_two_starts_is_not_started_again(
    tmp_path: Path,
) -> None:
    starts = tmp_path / "starts"
    supervisor = Supervisor(ignore)
    supervisor.start(_spec(tmp_path, _DIES.format(starts=starts), restarts=5))
    await _until(lambda: bool(supervisor.incidents))
    supervisor.terminate("child")
    await asyncio.wait_for(supervisor.wait(["child"]), 60)
    assert starts.read_text() == "x"


async def test_nothing_is_started_again_while_all_are_stopped(tmp_path: Path) -> None:
    """Another child takes its time to end, longer than the pause before the next start."""
    starts, ready = tmp_path / "starts", tmp_path / "ready"
    supervisor = Supervisor(ignore)
    slow = (
        "import pathlib, signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: (time.sleep(2), sys.exit()))\n"
        f"pathlib.Path({str(ready)!r}).touch(); time.sleep(60)"
    )
    supervisor.start(_spec(tmp_path, slow, name="slow"))
    await _until(ready.exists)
    supervisor.start(_spec(tmp_path, _DIES.format(starts=starts), restarts=5))
    await _until(lambda: bool(supervisor.incidents))
    before = starts.read_text()
    await supervisor.stop(grace_s=30.0)
    assert starts.read_text() == before


def _member(tmp_path: Path, name: str, code: str, *, needed: int = 1) -> ChildSpec:
    return replace(_spec(tmp_path, code, name=name), group="rollout", needed=needed)


async def test_a_group_goes_on_without_one_that_is_given_up(tmp_path: Path) -> None:
    supervisor = Supervisor(ignore)
    flag = tmp_path / "flag"
    waits = f"import pathlib, time\nwhile not pathlib.Path({str(flag)!r}).exists(): time.sleep(0.1)"
    supervisor.start(_member(tmp_path, "rollout-0", waits))
    supervisor.start(_member(tmp_path, "rollout-1", "import sys; sys.exit(1)"))
    await supervisor.wait(["rollout-1"])
    assert [i.outcome for i in supervisor.incidents] == ["gave up, the others go on"]
    assert (supervisor.running(), supervisor.given_up) == (["rollout-0"], {"rollout-1"})
    flag.touch()
    await supervisor.wait(["rollout-0", "rollout-1"])


@pytest.mark.parametrize(
    ("needed", "code", "error"), [(2, 1, ChildFailedError), (1, 2, ChildRefusedError)]
)
async def test_a_group_ends_with_too_few_of_it_or_with_a_refusal(
    tmp_path: Path, needed: int, code: int, error: type[Exception]
) -> None:
    supervisor = Supervisor(ignore)
    supervisor.start(_member(tmp_path, "rollout-0", "import time; time.sleep(60)", needed=needed))
    dies = f"import sys; sys.exit({code})"
    supervisor.start(_member(tmp_path, "rollout-1", dies, needed=needed))
    with pytest.raises(error, match="rollout-1"):
        await supervisor.wait(["rollout-0"])
    await supervisor.stop(grace_s=5.0)


async def test_the_last_of_a_group_ends_it(tmp_path: Path) -> None:
    """One that has finished, as when it was sent away, is not one that goes on."""
    supervisor = Supervisor(ignore)
    supervisor.start(_member(tmp_path, "rollout-0", "pass"))
    await supervisor.wait(["rollout-0"])
    supervisor.start(_member(tmp_path, "rollout-1", "import sys; sys.exit(1)"))
    with pytest.raises(ChildFailedError, match="rollout-1 died"):
        await supervisor.wait(["rollout-1"])


async def test_a_child_that_hangs_is_killed_and_started_again_unless_it_has_begun_since(
    tmp_path: Path,
) -> None:
    starts = tmp_path / "starts"
    supervisor = Supervisor(ignore)
    code = f"import time; open({str(starts)!r}, 'a').write('.'); time.sleep(60)"
    supervisor.start(_spec(tmp_path, code, restarts=1))
    await _until(lambda: starts.exists() and bool(starts.read_text()))
    pid = supervisor.pid("child")
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    since_s = time.time()
    supervisor.end_hung("somebody else's", since_s)
    supervisor.end_hung("child", since_s - 3600.0)
    assert is_alive(pid)
    supervisor.end_hung("child", since_s)
    await _until(lambda: len(starts.read_text()) == 2)
    supervisor.end_hung("child", since_s)
    (incident,) = supervisor.incidents
    assert (incident.pid, incident.how) == (pid, "signal 9 (SIGKILL), as it hung")
    assert incident.outcome == "restarted"
    await supervisor.stop(grace_s=5.0)
    assert len(supervisor.incidents) == 1
    assert not is_alive(pid)


async def test_who_is_cancelled_while_children_are_stopped_kills_them_at_once(
    tmp_path: Path,
) -> None:
    ready = tmp_path / "ready"
    supervisor = Supervisor(ignore)
    code = (
        "import pathlib, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
        f"pathlib.Path({str(ready)!r}).touch(); time.sleep(60)"
    )
    supervisor.start(_spec(tmp_path, code))
    await _until(ready.exists)
    pid = supervisor.pid("child")
    assert pid is not None
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(supervisor.stop(grace_s=60.0), 0.5)
    await _until(lambda: not is_alive(pid))
