"""A real S3-compatible server in a process of its own."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager

_START_S = 60


@contextmanager
def s3_server(bucket: str) -> Generator[dict[str, str]]:
    """Start one with an empty bucket; give s3fs's settings for it."""
    import s3fs

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
        found = {"key": "k", "secret": "s", "endpoint_url": f"http://127.0.0.1:{port}"}
        s3fs.S3FileSystem(**found).mkdir(bucket)
        yield found
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait(10)
