"""Several machines on one: network namespaces of Linux, joined by a bridge.

Each has its own loopback, one address that the others reach, a host name, and a name service that,
as Debian's does, gives that machine's own name as 127.0.1.1. Files are shared, as on a cluster.
"""

import contextlib
import os
import shutil
import subprocess
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path

_DEADLINE_S = 30.0
_SWITCH = "switch"
IPV4 = "10.83.0."
"""Beginning of the addresses of machines."""
IPV6 = "fd83::"
"""Beginning of the addresses of machines that are reached by IPv6 alone."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """One of them.

    Attributes:
        name: its host name.
        address: that others reach it by.
        space: its network namespace.
        switch: that of the bridge.
    """

    name: str
    address: str
    space: str
    switch: str

    def command(self, *command: str) -> list[str]:
        """Return a command as it is to be run to have it run there."""
        named = ["unshare", "--uts", "sh", "-c", f'hostname {self.name}; exec "$@"', "sh"]
        return ["ip", "netns", "exec", self.space, *named, *command]

    def run(self, *command: str) -> str:
        """Run something there and return what it wrote."""
        return _run(*self.command(*command))

    def slow_down(self, mbit: float) -> None:
        """Have no more than so many Mbit come to it over the wire in a second."""
        limit = ["rate", f"{int(1e6 * mbit)}bit", "burst", "16kb", "latency", "200ms"]
        self._limit("tbf", *limit)

    def speed_up(self) -> None:
        """Have what comes to it come as fast as it can again."""
        self._limit("pfifo")

    def _limit(self, *what: str) -> None:
        port = ["qdisc", "replace", "dev", f"port{self.name}", "root", *what]
        _run("ip", "netns", "exec", self.switch, "tc", *port)

    def bytes_sent(self) -> int:
        """Return what has left it over the wire."""
        return int(self.run("cat", "/sys/class/net/wire/statistics/tx_bytes"))

    def bytes_received(self) -> int:
        """Return what has come to it over the wire."""
        return int(self.run("cat", "/sys/class/net/wire/statistics/rx_bytes"))


def why_not() -> str:
    """Say what is missing for namespaces here; nothing if nothing is."""
    missing = [tool for tool in ("ip", "unshare", "hostname") if shutil.which(tool) is None]
    if missing:
        return f"network namespaces want {', '.join(missing)}"
    if os.geteuid() != 0:
        return "network namespaces want root"
    try:
        with machines(1) as (machine,):
            machine.run("true")
    except (OSError, subprocess.SubprocessError) as error:
        return f"network namespaces cannot be made here: {error}"
    return ""


@contextlib.contextmanager
def machines(count: int, *, network: str = IPV4) -> Generator[list[Machine]]:
    """Make so many, and take them away with all that still runs in them.

    Args:
        count: how many.
        network: beginning of their addresses. With that of IPv6 they have no others but loopback.
    """
    prefix = f"cosmos{os.getpid()}"
    switch = f"{prefix}{_SWITCH}"
    made = [
        Machine(name=f"node{i}", address=f"{network}{i + 1}", space=f"{prefix}n{i}", switch=switch)
        for i in range(count)
    ]
    try:
        _run("ip", "netns", "add", switch)
        _run("ip", "-n", switch, "link", "add", "bridge", "type", "bridge")
        _run("ip", "-n", switch, "link", "set", "bridge", "up")
        for machine in made:
            _plug_in(machine, switch)
            _name_hosts(machine, made)
        yield made
    finally:
        for space in [*(machine.space for machine in made), switch]:
            _take_away(space)


def _plug_in(machine: Machine, switch: str) -> None:
    space, port = machine.space, f"port{machine.name}"
    _run("ip", "netns", "add", space)
    _run("ip", "-n", space, "link", "set", "lo", "up")
    wire = ["link", "add", "wire", "type", "veth", "peer", "name", port, "netns", switch]
    _run("ip", "-n", space, *wire)
    _run("ip", "-n", switch, "link", "set", port, "master", "bridge", "up")
    # nobody else is there to have the address
    unique = ["/64", "nodad"] if ":" in machine.address else ["/24"]
    address = [f"{machine.address}{unique[0]}", "dev", "wire", *unique[1:]]
    _run("ip", "-n", space, "address", "add", *address)
    _run("ip", "-n", space, "link", "set", "wire", "up")


def _name_hosts(machine: Machine, made: list[Machine]) -> None:
    others = [f"{other.address} {other.name}" for other in made if other is not machine]
    folder = Path("/etc/netns") / machine.space  # where ip-netns looks for files of a namespace
    folder.mkdir(parents=True)
    lines = ["127.0.0.1 localhost", f"127.0.1.1 {machine.name}", *others]
    (folder / "hosts").write_text("\n".join(lines) + "\n")


def _take_away(space: str) -> None:
    shutil.rmtree(Path("/etc/netns") / space, ignore_errors=True)
    with contextlib.suppress(subprocess.SubprocessError, OSError):
        for pid in _run("ip", "netns", "pids", space).split():
            os.kill(int(pid), 9)
        _run("ip", "netns", "delete", space)


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=_DEADLINE_S, check=False)
    if done.returncode:
        raise subprocess.SubprocessError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout
