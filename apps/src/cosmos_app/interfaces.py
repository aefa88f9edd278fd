"""The network interfaces of this machine, and which one gloo uses.

torch has no option for that: a group looks into the environment when it is made.
"""

import fcntl
import ipaddress
import socket
import struct
from collections.abc import Mapping
from pathlib import Path

GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
_SIOCGIFADDR = 0x8915  # of Linux: asks for the address of an interface
_LONGEST_INTERFACE = 15
_INTERFACES_IPV6 = Path("/proc/net/if_inet6")  # a line each: address, ..., name
_CHOSEN = frozenset({"COSMOS_HOST", GLOO_INTERFACE})


def on_loopback(environment: Mapping[str, str]) -> dict[str, str]:
    """Return what has processes whose like are all on this machine speak over loopback.

    Gloo would listen at the address of the host name, which others may reach.

    Args:
        environment: theirs so far; one that names an address or an interface is left as it is.
    """
    name = "" if _CHOSEN & environment.keys() else interface_of("127.0.0.1")
    return {GLOO_INTERFACE: name} if name else {}


def interface_of(address: str) -> str:
    """Return the network interface of this machine that has an address; empty for none.

    Args:
        address: of IPv4 or IPv6.
    """
    if ":" in address:
        return _interface_of_ipv6(address)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:_LONGEST_INTERFACE])
            try:
                answer = fcntl.ioctl(asking.fileno(), _SIOCGIFADDR, request)
            except OSError:
                continue  # it has none
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return ""


def _interface_of_ipv6(address: str) -> str:
    try:
        wanted = ipaddress.IPv6Address(address.partition("%")[0]).packed.hex()
        lines = _INTERFACES_IPV6.read_text().splitlines()
    except (OSError, ValueError):
        return ""
    columns = (line.split() for line in lines)
    return next((words[-1] for words in columns if words[0] == wanted), "")
