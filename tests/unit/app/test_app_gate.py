"""Whoever guesses tokens is seen."""

from pathlib import Path
from urllib.parse import urlsplit

import pytest

from cosmos_app.dashboard.api import Served, make_app
from cosmos_app.dashboard.example import write_example_run
from cosmos_app.dashboard.feed import RunFeed
from cosmos_app.dashboard.server import open_address
from cosmos_core.rundir import RunDirectory
from cosmos_core.serving_config import DashboardConfig

httpx = pytest.importorskip("httpx")

TOKEN = "a-token-of-our-own"


async def test_requests_without_the_token_are_counted_and_one_a_minute_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_example_run(tmp_path / "example")
    app = make_app(Served(feed=RunFeed(RunDirectory.open(tmp_path / "example"))), TOKEN)
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
        for token in ("", "guess", "another guess"):
            headers = {"Authorization": f"Bearer {token}"}
            await client.get(f"/api/run?token={token}", headers=headers)
        page = (await client.get("/metrics", headers={"Authorization": f"Bearer {TOKEN}"})).text
    assert "cosmos_requests_refused_total 3.0" in page
    (line,) = (one for one in caplog.messages if "token" in one)
    assert line.startswith("a request from 127.0.0.1 had a wrong token or none")
    assert "guess" not in line


@pytest.mark.parametrize(
    "other", ['seen={"a": 1}', "name=two words", "é=1", "marked", "a[b]=1", "path=/", "Secure"]
)
async def test_cookies_of_other_servers_of_the_host_shut_nobody_out(
    tmp_path: Path, other: str
) -> None:
    write_example_run(tmp_path / "example")
    app = make_app(Served(feed=RunFeed(RunDirectory.open(tmp_path / "example"))), TOKEN)
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
        moved = await client.get("/", params={"token": TOKEN})
        ours = moved.headers["set-cookie"].partition(";")[0]
        client.cookies.clear()
        for cookies in (f"{other}; {ours}", f"{ours}; {other}"):
            answer = await client.get("/api/run", headers={"Cookie": cookies.encode()})
            assert answer.status_code == 200
        name = ours.partition("=")[0]
        for wrong in (other, f"{name}=wrong", f"x{ours}", f"other={ours}", name):
            answer = await client.get("/api/run", headers={"Cookie": wrong.encode()})
            assert answer.status_code == 401


@pytest.mark.parametrize("token", ["q83+vd/tRw4=+AAA", "100%41&more#of,it", "back\\slashed'token"])
async def test_the_address_of_a_run_lets_its_owner_in_whatever_its_token(
    tmp_path: Path, token: str
) -> None:
    write_example_run(tmp_path / "example")
    run = RunDirectory.open(tmp_path / "example")
    (tmp_path / "token").write_text(f"{token}\n")
    taken, address = open_address(DashboardConfig(token_file=tmp_path / "token"), run)
    taken.close()
    transport = httpx.ASGITransport(make_app(Served(feed=RunFeed(run)), address.token))
    query = urlsplit(address.url).query
    async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
        moved = await client.get(f"/?{query}")
        assert moved.status_code == 303
        ours = moved.headers["set-cookie"].partition(";")[0]
        client.cookies.clear()
        assert (await client.get("/", headers={"Cookie": ours})).status_code == 200
