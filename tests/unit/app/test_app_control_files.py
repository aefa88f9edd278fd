"""What holds a secret is its owner's alone, whatever lay there before."""

import asyncio
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from cosmos_app.control_files import (
    read_address,
    read_teacher_token,
    read_weights_token,
    write_address,
    write_teacher_token,
    write_weights_token,
)
from cosmos_app.dashboard.address import (
    DashboardAddress,
    announce_dashboard,
    write_address_file,
)
from cosmos_app.dashboard.example import write_example_run
from cosmos_app.dashboard.feed import RunFeed
from cosmos_core.rundir import RunDirectory


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RunDirectory]:
    with RunDirectory.create(tmp_path / "run", config_json="{}", now_s=0.0) as run:
        yield run


def modes(run: RunDirectory) -> dict[str, int]:
    names = ("redis.url", "weights.token", "teachers.token", "dashboard.json")
    return {name: (run.path / name).stat().st_mode & 0o777 for name in names}


def write_all(run: RunDirectory) -> None:
    write_address(run, "redis://:p4ss@host:1/0", "name")
    write_weights_token(run)
    write_teacher_token(run)
    write_address_file(run, DashboardAddress(url="http://here", port=1, token="token"))


def test_tokens_are_made_once_and_for_the_owner_alone(run: RunDirectory) -> None:
    write_all(run)
    first = read_weights_token(run), read_teacher_token(run)
    write_all(run)
    assert (read_weights_token(run), read_teacher_token(run)) == first
    assert len({*first}) == 2
    assert min(map(len, first)) == 32
    assert set(modes(run).values()) == {0o600}


def test_files_that_others_could_read_are_made_anew(run: RunDirectory) -> None:
    """As in a directory that was copied: whoever has one open sees nothing that is written."""
    write_all(run)
    for name in modes(run):
        (run.path / name).chmod(0o644)
    with (run.path / "redis.url").open() as opened_before:
        write_all(run)
        write_address(run, "redis://:other@host:1/0", "name")
        assert "other" not in opened_before.read()
    assert set(modes(run).values()) == {0o600}
    assert read_address(run) == ("redis://:other@host:1/0", "name")


@pytest.mark.parametrize(("host", "is_told"), [("127.0.0.1", False), ("192.0.2.1", True)])
async def test_who_starts_a_run_is_told_that_others_can_reach_its_dashboard(
    run: RunDirectory, host: str, is_told: bool
) -> None:
    said: list[str] = []
    telling = asyncio.create_task(announce_dashboard(run, said.append))
    await asyncio.sleep(0.01)
    write_address_file(run, DashboardAddress(url=f"http://{host}:1/?token=t", port=1, token="t"))
    await asyncio.wait_for(telling, 10.0)
    assert [f"{host} can be reached from other machines" in line for line in said[1:]] == (
        [True] if is_told else []
    )


@pytest.fixture
def somebody_elses() -> Iterator[RunDirectory]:
    """Return a run that is over, of another user, who lets everybody see but the secrets."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run"
        write_example_run(path)
        run = RunDirectory.open(path)
        write_address(run, "redis://:p4ss@host:1/0", "name")
        Path(folder).chmod(0o755)
        user = os.geteuid()
        # root reads whatever there is; anybody else nothing that nobody may
        (run.path / "redis.url").chmod(0o600 if user == 0 else 0)
        if user == 0:
            os.seteuid(65534)
        try:
            yield run
        finally:
            if user == 0:
                os.seteuid(0)


async def test_a_run_of_somebody_else_is_shown_without_its_redis(
    somebody_elses: RunDirectory,
) -> None:
    feed = RunFeed(somebody_elses)
    await feed.look()
    assert len(feed.events) > 30
    assert feed.report
    assert feed.problem == (
        f"{somebody_elses.path} is somebody else's: where its Redis is may be read by who started "
        "it alone"
    )
