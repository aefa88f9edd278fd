"""A connection that is closed while a thread begins to wait on it, and its descriptor used anew."""

import socket
import sys
import threading
from collections.abc import Generator
from contextlib import closing

import pytest

from cosmos_weightsync.deadlines import Deadline
from cosmos_weightsync.errors import PeerLostError, WeightSyncError
from cosmos_weightsync.frames import ControlConnection
from cosmos_weightsync.transports.host_sockets import HostConnection

_ROUNDS = 300


def _over_tcp() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        return near, listener.accept()[0]


def _control(connection: socket.socket) -> ControlConnection:
    return ControlConnection(connection, "peer")


def _host(connection: socket.socket) -> HostConnection:
    return HostConnection(connection, "sender")


@pytest.fixture
def reused_descriptors() -> Generator[None]:
    """Threads take turns as often as can be, and what one closes another opens at once."""
    before, done = sys.getswitchinterval(), threading.Event()

    def open_and_close():
        kept = []
        while not done.is_set():
            kept.append(socket.socketpair())
            if len(kept) > 20:
                for end in kept.pop(0):
                    end.close()
        for pair in kept:
            for end in pair:
                end.close()

    sys.setswitchinterval(1e-6)
    churn = threading.Thread(target=open_and_close)
    churn.start()
    yield
    done.set()
    churn.join()
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("reused_descriptors")
@pytest.mark.parametrize(
    ("pair", "connection", "call"),
    [
        (_over_tcp, _control, "receive"),
        (socket.socketpair, _host, "receive_json"),
    ],
    ids=["control", "host"],
)
def test_who_waits_on_a_closed_connection_never_waits_on_another(pair, connection, call):
    found = []

    def wait(of, begun):
        begun.set()
        try:
            getattr(of, call)(Deadline.after(5.0))
        except WeightSyncError as error:
            found.append(type(error))

    for _ in range(_ROUNDS):
        near, far = pair()
        with closing(far):
            waiting, begun = connection(near), threading.Event()
            thread = threading.Thread(target=wait, args=(waiting, begun))
            thread.start()
            begun.wait()
            waiting.close()
            thread.join()
        if found[-1] is not PeerLostError:
            break
    assert set(found) == {PeerLostError}
