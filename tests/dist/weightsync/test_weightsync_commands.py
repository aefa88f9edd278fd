"""The command line in real processes: pushed, killed, pulled again, and the same bit for bit."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from weight_commands import (
    Pushed,
    command_line,
    contents,
    end,
    finish,
    make_checkpoint,
    size_below,
    start_command,
)

from cosmos_weightsync import Layout
from cosmos_weightsync.transports import NixlTransport


def start(*arguments: object, limit_bytes: int = 0) -> subprocess.Popen[str]:
    command = command_line(*arguments)
    if limit_bytes:  # As a disk that is full, without a disk.
        limit = f"import resource, signal, runpy, sys; sys.argv = {command[2:]!r}\n"
        limit += "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        limit += f"resource.setrlimit(resource.RLIMIT_FSIZE, ({limit_bytes}, {limit_bytes}))\n"
        limit += "runpy.run_module('cosmos_weightsync', run_name='__main__')"
        command = [sys.executable, "-c", limit]
    return start_command(command)


def run(*arguments: object, status: int = 0, limit_bytes: int = 0) -> tuple[str, str]:
    return finish(start(*arguments, limit_bytes=limit_bytes), status)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def pushed(checkpoint: Path) -> Iterator[Pushed]:
    process = start("push", checkpoint, "--json")
    yield Pushed(process)
    end(process)


def test_a_pulled_checkpoint_is_the_pushed_one_bit_for_bit(checkpoint, pushed, tmp_path):
    target = tmp_path / "copy"
    out, _ = run("pull", pushed.endpoint, target, "--token", pushed.token, "--json")
    said = json.loads(out)
    assert said["kept_bytes"] == 0
    assert contents(target) == contents(checkpoint)
    assert not (target / ".hidden").exists()
    assert not (target / ".pull").exists()
    out, _ = run("verify", checkpoint, target, "--json")
    assert json.loads(out)["same"] is True
    out, _ = run("verify", target, "--json")  # Its manifest came with it.
    assert json.loads(out)["differences"] == []


def test_a_killed_pull_goes_on_where_it_ended(checkpoint, pushed, tmp_path):
    whole = sum(map(len, contents(checkpoint).values()))
    target = tmp_path / "copy"
    for share in (0.2, 0.5, 0.8):
        process = start("pull", pushed.endpoint, target, "--token", pushed.token, "--json")
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and process.poll() is None:
            if size_below(target) > share * whole:
                break
        end(process)
    kept = {path.name: path.stat().st_mtime_ns for path in target.glob("*.safetensors")}
    out, _ = run("pull", pushed.endpoint, target, "--token", pushed.token, "--json")
    assert json.loads(out)["kept_bytes"] > 0.4 * whole
    assert contents(target) == contents(checkpoint)
    for name, changed in kept.items():
        assert (target / name).stat().st_mtime_ns == changed


def test_what_was_damaged_on_the_disk_is_fetched_anew_and_no_more(checkpoint, pushed, tmp_path):
    target = tmp_path / "copy"
    run("pull", pushed.endpoint, target, "--token", pushed.token)
    file = next(iter(sorted(target.glob("*.safetensors"))))
    with file.open("r+b") as handle:
        handle.seek(file.stat().st_size - 5)
        handle.write(b"!")
    _, err = run("verify", target, status=1)
    assert "1 differences" in err
    out, _ = run("pull", pushed.endpoint, target, "--token", pushed.token, "--json")
    assert 0 < json.loads(out)["fetched_bytes"] <= file.stat().st_size
    assert contents(target) == contents(checkpoint)


def test_a_full_disk_is_said_and_keeps_what_came(pushed, checkpoint, tmp_path):
    target = tmp_path / "copy"
    arguments = ("pull", pushed.endpoint, target, "--token", pushed.token)
    _, err = run(*arguments, status=1, limit_bytes=10 << 20)
    assert "no room left" in err
    assert "Make room, then run this again" in err
    assert "Traceback" not in err
    out, _ = run(*arguments, "--json")
    assert json.loads(out)["kept_bytes"] >= 8 << 20
    assert contents(target) == contents(checkpoint)


def test_a_pull_that_is_interrupted_says_how_to_go_on(pushed, tmp_path):
    process = start("pull", pushed.endpoint, tmp_path / "copy", "--token", pushed.token)
    while not (tmp_path / "copy").exists() and process.poll() is None:
        time.sleep(0.001)
    os.kill(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert "Traceback" not in err
    if process.returncode:  # Else it was faster.
        assert process.returncode == 130
        assert "Run the same command again" in err


def test_a_push_for_one_ends_by_itself(checkpoint, tmp_path):
    pusher = start("push", checkpoint, "--json", "--once")
    pushed = Pushed(pusher)
    run("pull", pushed.endpoint, tmp_path / "copy", "--token", pushed.token)
    _, err = pusher.communicate(timeout=60)
    assert (pusher.returncode, err) == (0, "")


def test_a_push_on_all_addresses_shows_a_command_for_other_hosts(checkpoint):
    process = start("push", checkpoint, "--json", "--host", "0.0.0.0")
    try:
        assert process.stdout is not None
        said = json.loads(process.stdout.readline())
    finally:
        end(process)
    port = said["endpoint"].removeprefix("0.0.0.0:")
    assert said["pull"].startswith(f"cosmos-weightsync pull {socket.gethostname()}:{port} ")


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("pull", "{endpoint}", "{tmp}/copy", "--token", "wrong"), "token is not the one"),
        (("pull", "127.0.0.1:9", "{tmp}/copy"), "cannot be reached"),
        (("pull", "{tmp}/nowhere", "{tmp}/copy"), "neither host:port, nor a directory"),
        (("push", "{tmp}"), "no .safetensors file"),
        (("plan", "{tmp}/nowhere"), "no such file or directory"),
        (("plan", "{model}", "--senders", "dp=3"), "write replicas=N or fsdp=N or tp=N"),
        (("verify", "{tmp}"), "has no manifest.json: name a second checkpoint"),
        (("verify", "{model}", "{tmp}/nowhere"), "nowhere: there is no such directory"),
        (("bench", "--size", "99999999"), "times as much memory, and this machine has"),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_what_cannot_work_ends_with_a_reason(arguments, complaint, pushed, checkpoint, tmp_path):
    words = {"endpoint": pushed.endpoint, "tmp": tmp_path, "model": checkpoint}
    _, err = run(*(item.format(**words) for item in arguments), status=1)
    assert complaint in err
    assert "Traceback" not in err


def test_a_plan_is_the_same_from_a_directory_and_from_its_layout(checkpoint, tmp_path):
    from cosmos_weightsync import read_checkpoint

    layout = read_checkpoint(checkpoint).layout()
    (tmp_path / "model.msgpack").write_bytes(layout.to_msgpack())
    (tmp_path / "model.json").write_text(json.dumps(layout.to_json()))
    cut = ("--senders", "fsdp=4", "--receivers", "tp=2,replicas=3", "--json")
    said = [
        json.loads(run("plan", where, *cut)[0])
        for where in (checkpoint, tmp_path / "model.msgpack", tmp_path / "model.json")
    ]
    assert said[0] == said[1] == said[2]
    assert said[0]["total_bytes"] == 3 * 8 * 3 * 4 << 20
    assert (said[0]["sender_ranks"], said[0]["receiver_ranks"]) == (4, 6)
    by_host = json.loads(run("plan", checkpoint, *cut, "--gpus-per-host", 8)[0])
    assert by_host["cross_host_bytes"] == 8 * 3 * 4 << 20  # Once, for all three replicas.
    assert by_host["times_the_bound"] >= 1
    assert Layout.from_msgpack(layout.to_msgpack()).digest() == layout.digest()


def test_the_transports_are_measured(tmp_path):
    names = ["tcp", "nixl" if NixlTransport.is_installed() else "shared_memory"]
    options = [word for name in names for word in ("--transport", name)]
    said = json.loads(run("bench", "--size", 16, "--repeats", 2, *options, "--json")[0])
    assert set(said) == {"moved", "copy_bound", *names}
    assert said["tcp"]["best_gb_per_s"] >= said["tcp"]["median_gb_per_s"] > 0


@pytest.mark.parametrize("command", ["plan", "simulate", "push", "pull", "verify", "bench"])
def test_every_command_shows_examples(command):
    out, _ = run(command, "--help")
    assert f"  cosmos-weightsync {command} " in out.partition("Examples:")[2]
