"""Tests for machines that have IPv6 on their loopback interface."""

import socket

from capabilities import needs


def _has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


WITH_IPV6 = needs("ipv6", _has_ipv6())
