"""OpenStack Swift on loopback: an object store of four processes that one may kill."""

import getpass
import os
import random
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from pathlib import Path

from capabilities import skip_without

PYTHON = os.environ.get("COSMOS_SWIFT_PYTHON")  # by scripts/s3_environment.sh
STORING = ("account", "container", "object")
ALL = (*STORING, "proxy")
_USER, _SECRET = "tests:tester", "secret"
_START_S = 180
_PORTS = range(20000, 30000)
"""Below those that Linux gives to whoever asks for any."""

_CONF = """[swift-hash]
swift_hash_path_suffix = tests
[storage-policy:0]
name = one-copy
default = yes
"""
_SERVER = """[DEFAULT]
bind_ip = 127.0.0.1
bind_port = {port}
swift_dir = {folder}
devices = {folder}/devices
mount_check = false
user = {user}
workers = 0
{more}
[pipeline:main]
pipeline = {before} {name}-server
[app:{name}-server]
use = egg:swift#{name}
conn_timeout = 30
node_timeout = 60
"""
# Swift's own patience, of half a second, is short where tests run side by side.
_UPDATES = "container_update_timeout = 60\n"
_PROXY = f"""error_suppression_interval = 1
account_autocreate = true
[filter:s3api]
use = egg:swift#s3api
[filter:tempauth]
use = egg:swift#tempauth
user_{_USER.replace(":", "_")} = {_SECRET} .admin
[filter:bulk]
use = egg:swift#bulk
[filter:slo]
use = egg:swift#slo
"""


class Swift:
    """One of each of Swift's servers; `start` comes first.

    Args:
        folder: Where all of it lies; it must have extended attributes, as ext4 has.

    Attributes:
        settings: What s3fs is given.
        disk: What the servers write to.
        processes: Those that run, by the names in `ALL`.
    """

    def __init__(self, folder: Path) -> None:
        assert PYTHON is not None
        self._folder = folder
        self._environment = {**os.environ, "SWIFT_CONF_FILE": f"{folder}/swift.conf"}
        self._ports = dict(zip(ALL, _free_ports(len(ALL)), strict=True))
        endpoint = f"http://127.0.0.1:{self._ports['proxy']}"
        self.settings = {"key": _USER, "secret": _SECRET, "endpoint_url": endpoint}
        self.disk = folder / "devices" / "disk"
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.disk.mkdir(parents=True)
        (folder / "swift.conf").write_text(_CONF)
        places = [f"{name}={self._ports[name]}" for name in STORING]
        rings = Path(__file__).with_name("swift_rings.py")
        subprocess.run([PYTHON, rings, folder, *places], env=self._environment, check=True)

    def start(self, names: Iterable[str] = ALL, *, kept_free: str = "1%") -> None:
        """Start servers on what was stored before; return when they listen.

        Args:
            names: Of those in `ALL` that do not run.
            kept_free: What is left of the disk when it counts as full.
        """
        names = tuple(names)
        for name in names:
            self._start(name, f"fallocate_reserve = {kept_free}")
        deadline = time.monotonic() + _START_S
        for name in names:
            while not _listens(self._ports[name]):
                log = self._folder / f"{name}.log"
                assert self.processes[name].poll() is None, log.read_text()
                assert time.monotonic() < deadline, log.read_text()
                time.sleep(0.05)

    def kill(self, names: Iterable[str] = ALL) -> None:
        """End servers, whatever they are doing, as if their machine had lost its power."""
        ended = [self.processes.pop(name) for name in names if name in self.processes]
        for process in ended:
            process.send_signal(signal.SIGKILL)
        for process in ended:
            process.wait(10)

    def _start(self, name: str, more: str) -> None:
        is_proxy = name == "proxy"
        written = _SERVER.format(
            name=name,
            port=self._ports[name],
            folder=self._folder,
            user=getpass.getuser(),
            before="s3api tempauth bulk slo" if is_proxy else "",
            more=more,
        )
        path = self._folder / f"{name}.conf"
        path.write_text(written + {"proxy": _PROXY, "object": _UPDATES}.get(name, ""))
        command = [PYTHON, Path(PYTHON).with_name(f"swift-{name}-server"), path, "-v"]
        with (self._folder / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                command, env=self._environment, stdout=log, stderr=log
            )


@contextmanager
def swift_servers() -> Generator[Swift]:
    """Start them on an empty disk, or skip the test where that cannot be."""
    if PYTHON is None:
        skip_without("swift")
    with tempfile.TemporaryDirectory() as folder:
        try:
            os.setxattr(folder, "user.tests", b"1")
        except OSError:
            skip_without("attributes", folder)
        servers = Swift(Path(folder))
        try:
            servers.start()
            yield servers
        finally:
            servers.kill()


def _free_ports(count: int) -> list[int]:
    found: list[int] = []
    for port in random.sample(_PORTS, len(_PORTS)):
        try:
            socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            continue
        found.append(port)
        if len(found) == count:
            return found
    raise AssertionError(f"there are no {count} free ports in {_PORTS}")


def _listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True
