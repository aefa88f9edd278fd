"""Where processes of this machine listen over TCP, as /proc tells of them."""

import contextlib
import ipaddress
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from processes import title_of

_LISTENING = "0A"


@dataclass(frozen=True, kw_only=True, slots=True)
class Listener:
    """A socket that waits for others.

    Attributes:
        address: where, of IPv4 if it can be.
        port: where.
        process: the title of one of those who hold it.
    """

    address: ipaddress.IPv4Address | ipaddress.IPv6Address
    port: int
    process: str


def listeners(pids: Iterable[int]) -> set[Listener]:
    """Return what these processes listen on; those that have ended do no more."""
    held = {inode: title for pid in pids for inode, title in _sockets(pid).items()}
    found = set[Listener]()
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(FileNotFoundError):  # there is no IPv6
            for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
                _, local, _, state, *rest = line.split()
                if state == _LISTENING and (title := held.get(rest[5])) is not None:
                    address, port = local.split(":")
                    found.add(
                        Listener(address=_address(address), port=int(port, 16), process=title)
                    )
    return found


def _sockets(pid: int) -> dict[str, str]:
    """Return the inodes of a process's sockets, with its title."""
    found: dict[str, str] = {}
    with contextlib.suppress(OSError):  # it has ended meanwhile
        title = title_of(pid)
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                kind, _, inode = str(descriptor.readlink()).partition(":[")
                if kind == "socket":
                    found[inode.rstrip("]")] = title
    return found


def _address(digits: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """Return an address of which the kernel writes each word as this machine holds it."""
    data = bytes.fromhex(digits)
    words = [data[at : at + 4][::-1] for at in range(0, len(data), 4)]
    address = ipaddress.ip_address(b"".join(words))
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address
