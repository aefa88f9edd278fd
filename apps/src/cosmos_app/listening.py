"""What is said of sockets that wait for others, on addresses of IPv4 and IPv6 alike."""

import ipaddress
import socket

from cosmos_core.addresses import in_url


def http_url(taken: socket.socket) -> str:
    """Return the URL of a listening socket, without a path."""
    host, port = taken.getsockname()[:2]
    return f"http://{in_url(host)}:{port}"


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
