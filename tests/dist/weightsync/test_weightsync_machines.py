"""``push`` and ``pull`` between machines: network namespaces with addresses of their own."""

import json
import re
import shlex
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from capabilities import skip_without
from machines import IPV4, IPV6, Machine, machines, why_not
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

pytestmark = pytest.mark.slow
_DEADLINE_S = 60.0


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def older(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Other values under the same names."""
    return make_checkpoint(tmp_path_factory.mktemp("older"), seed=8)


@pytest.fixture
def two(request: pytest.FixtureRequest) -> Iterator[list[Machine]]:
    if reason := why_not():
        skip_without("machines", reason)
    with machines(2, network=getattr(request, "param", IPV4)) as made:
        yield made


def start(machine: Machine, *arguments: object) -> subprocess.Popen[str]:
    return start_command(machine.command(*command_line(*arguments)))


def pushed(machine: Machine, checkpoint: Path, *options: str) -> Pushed:
    return Pushed(start(machine, "push", checkpoint, "--json", *options))


def told(said: dict[str, str], target: Path) -> list[str]:
    """The arguments of the command that ``push`` tells its user to type elsewhere."""
    program, *arguments = shlex.split(said["pull"])
    assert program == "cosmos-weightsync"
    return [str(target) if word == "DIR" else word for word in arguments]


@pytest.mark.parametrize("two", [IPV4, IPV6], indirect=True)
def test_a_checkpoint_goes_to_another_machine_by_the_command_that_push_tells(
    two: list[Machine], checkpoint: Path, tmp_path: Path
) -> None:
    here, there = two
    push = pushed(here, checkpoint, "--host", here.address, "--once")
    assert here.address in push.endpoint
    assert "other_machines" not in push.said
    out, _ = finish(start(there, *told(push.said, tmp_path / "copy"), "--json"))
    assert finish(push.process)[1] == ""
    assert contents(tmp_path / "copy") == contents(checkpoint)
    assert there.bytes_received() > json.loads(out)["total_bytes"] > 96 << 20


def test_push_without_an_address_says_that_others_cannot_connect_and_what_to_do(
    two: list[Machine], checkpoint: Path, tmp_path: Path
) -> None:
    here, there = two
    push = pushed(here, checkpoint)
    try:
        assert "begin again with --host" in push.said["other_machines"]
        _, err = finish(start(there, *told(push.said, tmp_path / "copy")), status=1)
        assert "nobody listens there on this host" in err
        assert "of 'push' --host" in err
        finish(start(here, *told(push.said, tmp_path / "beside")))
    finally:
        end(push.process)
    assert contents(tmp_path / "beside") == contents(checkpoint)
    assert not (tmp_path / "copy").exists()
    push = pushed(here, checkpoint, "--host", "0.0.0.0")
    try:
        arguments = told(push.said, tmp_path / "copy")
        assert arguments[1].startswith(f"{here.name}:")
        finish(start(there, *arguments))
    finally:
        end(push.process)
    assert contents(tmp_path / "copy") == contents(checkpoint)


@pytest.mark.parametrize(
    ("endpoint", "complaint"),
    [
        ("{address}:9", "Connection refused; nobody listens there any more"),
        (f"{IPV4}77:4321", "No route to host"),
        ("192.0.2.1:4321", "Network is unreachable"),
        ("nowhere.invalid:4321", "cannot be reached"),
    ],
)
def test_who_cannot_be_reached_is_an_error_that_says_so(
    two: list[Machine], endpoint: str, complaint: str, tmp_path: Path
) -> None:
    where = endpoint.format(address=two[0].address)
    begun = time.monotonic()
    arguments = ("pull", where, tmp_path / "copy", "--token", "t", "--timeout", 10)
    _, err = finish(start(two[1], *arguments), status=1)
    assert complaint in err
    assert where in err
    assert "Is the other side still running, and reachable from here?" in err
    assert "Traceback" not in err
    assert time.monotonic() - begun < _DEADLINE_S
    assert not (tmp_path / "copy").exists()


@pytest.mark.parametrize("loss", ["the pusher is killed", "the wire is cut"])
def test_a_pull_that_loses_its_pusher_keeps_what_was_there_and_is_finished_by_another(
    two: list[Machine], checkpoint: Path, older: Path, tmp_path: Path, loss: str
) -> None:
    here, there = two
    limit = ["rate", "500mbit", "burst", "1mb", "latency", "100ms"]
    here.run("tc", "qdisc", "add", "dev", "wire", "root", "tbf", *limit)
    target = tmp_path / "copy"
    shutil.copytree(older, target)
    before = contents(target)
    push = pushed(here, checkpoint, "--host", here.address)
    pull = start(there, *told(push.said, target), "--timeout", "5")
    wait_for_some(target / ".pull", pull)
    if loss == "the wire is cut":
        here.run("ip", "link", "set", "wire", "down")
        complaint = "nothing from sender at"
    else:
        push.process.kill()
        complaint = "closed the connection|is gone"  # what it had not read yet resets it
    _, err = finish(pull, status=1)
    end(push.process)
    assert re.search(complaint, err)
    assert "un this again to go on where it stopped." in err
    assert "Traceback" not in err
    found = contents(target)
    assert {path: found[path] for path in found if not path.startswith(".pull/")} == before
    here.run("ip", "link", "set", "wire", "up")
    again = pushed(here, checkpoint, "--host", here.address, "--once")
    out, _ = finish(start(there, *told(again.said, target), "--json"))
    finish(again.process)
    assert json.loads(out)["kept_bytes"] > 8 << 20
    assert contents(target) == contents(checkpoint)
    assert not (target / ".pull").exists()


def wait_for_some(parts: Path, pull: subprocess.Popen[str]) -> None:
    """Until a third of it is there."""
    deadline = time.monotonic() + _DEADLINE_S
    while size_below(parts) < 32 << 20:
        assert pull.poll() is None, "it ended before"
        assert time.monotonic() < deadline, "it does not begin"
        time.sleep(0.002)
