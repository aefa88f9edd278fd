"""A server that speaks S3: Swift, which is an object store, or moto's, which plays one."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager

import pytest
import swift_servers

SERVERS = ("swift", "moto")
_START_S = 60


@contextmanager
def s3_server(bucket: str, name: str = "") -> Generator[dict[str, str]]:
    """Start one with an empty bucket; give s3fs's settings for it.

    Args:
        bucket: Its name.
        name: Which of `SERVERS`, for a test that waits for it; Swift if there is one where empty.
    """
    s3fs = pytest.importorskip("s3fs")
    started = {"swift": _swift, "moto": _moto}
    with started[name or ("swift" if swift_servers.PYTHON else "moto")]() as found:
        s3fs.S3FileSystem(**found).mkdir(bucket)
        yield found


@contextmanager
def _swift() -> Generator[dict[str, str]]:
    with swift_servers.swift_servers() as servers:
        yield servers.settings


@contextmanager
def _moto() -> Generator[dict[str, str]]:
    pytest.importorskip("moto")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    server = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        deadline = time.monotonic() + _START_S
        while time.monotonic() < deadline:
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                break
            except OSError:
                time.sleep(0.1)
        yield {"key": "k", "secret": "s", "endpoint_url": f"http://127.0.0.1:{port}"}
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait(10)
