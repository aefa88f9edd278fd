"""The secrets of a run are in files of its owner's, and nowhere else that others can look."""

import json
import signal
from pathlib import Path

import pytest
from click.testing import CliRunner
from real_runs import SMALL, Run, Runner

from cosmos_app.cli import main
from cosmos_app.control_files import read_address
from cosmos_app.event_log import read_events
from cosmos_core.rundir import RunDirectory
from cosmos_weightsync import ProtocolError, ReceiverConfig, WeightReceiver

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def secrets_of(run: Run) -> dict[str, bytes]:
    url, _ = read_address(RunDirectory.open(run.output))
    return {
        "redis": url.rpartition("@")[0].rpartition(":")[2].encode(),
        "dashboard": json.loads((run.output / "dashboard.json").read_text())["token"].encode(),
        "weights": (run.output / "weights.token").read_bytes(),
    }


def command_lines(output: Path) -> list[bytes]:
    """Return those of all processes that have to do with a run: other users see them."""
    found: list[bytes] = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                line = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if str(output).encode() in line:
                found.append(line)
    return found


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run that has published weights, and goes on."""
    runner = Runner(tmp_path_factory.mktemp("secrets"))
    run = runner.start(*SMALL, "trainer.steps=100000")
    run.wait_for(lambda: run.steps_done() >= 1 and (run.output / "dashboard.json").exists())
    yield run
    run.process.send_signal(signal.SIGINT)
    assert run.finish() == 3, run.logs()


def test_no_secret_is_in_a_list_of_processes_or_in_what_status_shows(run: Run) -> None:
    lines = command_lines(run.output)
    status = CliRunner().invoke(main, ["status", str(run.output)])
    assert len(lines) >= 4
    assert status.exit_code == 0
    dashboard = status.output.encode()  # shows its owner the address that opens it
    for name, secret in secrets_of(run).items():
        assert len(secret) >= 32, name
        assert not any(secret in line for line in lines), name
        assert name == "dashboard" or secret not in dashboard, name


def test_secrets_are_in_files_of_the_owner_alone(run: Run) -> None:
    secrets = secrets_of(run)
    holding: dict[str, int] = {}
    for path in run.output.rglob("*"):
        if path.is_file() and any(secret in path.read_bytes() for secret in secrets.values()):
            holding[str(path.relative_to(run.output))] = path.stat().st_mode & 0o777
    names = ["dashboard.json", "redis.url", "redis/redis.conf", "weights.token"]
    assert holding == dict.fromkeys(names, 0o600)


@pytest.mark.parametrize("token", ["", "guess"])
def test_another_user_of_the_machine_is_sent_no_weights(run: Run, token: str) -> None:
    events = read_events(run.output / "events.jsonl")
    endpoints = next(e["endpoints"] for e in events if e.get("endpoints"))
    with (
        pytest.raises(ProtocolError, match="the token is not the sender's"),
        WeightReceiver(tuple(endpoints), config=ReceiverConfig(token=token)) as stranger,
    ):
        stranger.stage(0, timeout_s=20.0)
