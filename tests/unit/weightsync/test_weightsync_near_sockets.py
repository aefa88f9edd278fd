"""Connections within a host are not paced by what the system paces networks by."""

import contextlib
import os
import socket
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from capabilities import needs

from cosmos_weightsync.deadlines import Deadline
from cosmos_weightsync.transports import ProcessGroupTransport, TcpTransport
from cosmos_weightsync.transports.near_sockets import unpace, unpaced_meanwhile

pytestmark = needs("linux", sys.platform == "linux")


def pacing(connection: socket.socket) -> bytes:
    return connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0")


def paced_by_another() -> bytes:
    """What a process may choose beside reno: cubic or bbr, of which every system has one."""
    available = Path("/proc/sys/net/ipv4/tcp_available_congestion_control").read_text()
    return next(name for name in available.split() if name != "reno").encode()


@contextlib.contextmanager
def connected(address: str, source: str) -> Iterator[tuple[socket.socket, socket.socket]]:
    """The two ends of a connection that the system paces in another way than reno."""
    with socket.create_server((address, 0)) as listener:
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, paced_by_another())
        where = listener.getsockname()
        with socket.create_connection(where, source_address=(source, 0)) as calling:
            calling.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, paced_by_another())
            answering, _ = listener.accept()
            with answering:
                yield calling, answering


def test_a_connection_within_a_host_is_not_paced():
    with connected("127.0.0.1", "127.0.0.1") as ends:
        for end in ends:
            unpace(end)
            assert pacing(end) == b"reno"


def test_one_between_two_addresses_is_as_the_system_has_it():
    with connected("127.0.0.1", "127.0.0.2") as ends:
        for end in ends:
            unpace(end)
            assert pacing(end) == paced_by_another()


def test_what_is_no_connection_is_left_alone():
    with socket.socket() as alone, socket.socket(socket.AF_UNIX) as local:
        before = pacing(alone)
        unpace(alone)
        unpace(local)
        assert pacing(alone) == before


def test_connections_of_a_library_are_found_and_those_before_are_not_touched():
    with connected("127.0.0.1", "127.0.0.1") as older, contextlib.ExitStack() as stack:
        with unpaced_meanwhile():
            newer = stack.enter_context(connected("127.0.0.1", "127.0.0.1"))
        assert [pacing(end) for end in newer] == [b"reno"] * 2
        assert [pacing(end) for end in older] == [paced_by_another()] * 2
        newer[0].sendall(b"still open")
        assert newer[1].recv(16) == b"still open"


@pytest.mark.parametrize(
    "transport", [TcpTransport(), ProcessGroupTransport()], ids=lambda t: t.name
)
def test_channels_within_a_host_are_not_paced(transport):
    sender, receiver = (transport.prepare(side, "127.0.0.1") for side in ("sender", "receiver"))
    before = open_connections()
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(sender.connect, receiver.description, Deadline.after(60))
        ends = [receiver.connect(sender.description, Deadline.after(60)), other.result()]
    try:
        paced = [name for key, name in open_connections().items() if key not in before]
        if transport.name == "tcp":
            assert paced == [b"reno"] * 2
        # The store's may be among gloo's, which are found by when they came.
        assert paced.count(b"reno") >= 2
    finally:
        for end in ends:
            end.close()


def open_connections() -> dict[str, bytes]:
    """How each of this process's connections over IP is paced, by the system's name for it."""
    found: dict[str, bytes] = {}
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            key = os.readlink(f"/proc/self/fd/{descriptor}")
            if key.startswith("socket:"):
                with socket.socket(fileno=os.dup(int(descriptor))) as one:
                    one.getpeername()
                    found[key] = pacing(one)
    return found
