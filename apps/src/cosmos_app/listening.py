"""What is said of sockets that wait for others, on addresses of IPv4 and IPv6 alike."""

import ipaddress
import socket

from cosmos_core.addresses import in_url


def http_url(taken: socket.socket) -> str:
    """Return the URL of a listening socket, without a path."""
    host, port = taken.getsockname()[:2]
    return f"http://{in_url(host)}:{port}"


def reachable_url(taken: socket.socket) -> str:
    """Return the URL by which others reach a listening socket, without a path.

    One that listens on every address of this machine is reached by the machine's name.
    """
    host, port = taken.getsockname()[:2]
    if not ipaddress.ip_address(host.partition("%")[0]).is_unspecified:
        return http_url(taken)
    return f"http://{socket.gethostname()}:{port}"


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def exposure(host: str) -> str:
    """Return what somebody should know who listens on an address; empty for loopback."""
    if is_loopback(host):
        return ""
    return f"{host} can be reached from other machines, and nothing is encrypted"
