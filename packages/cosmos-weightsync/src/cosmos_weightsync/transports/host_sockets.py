"""How two processes of one host meet: a Unix socket that can carry file descriptors.

The sender listens on an abstract address that nobody can guess and checks that whoever comes is of
the same user. The end of the stream says that the other process has died, so nothing is polled.
"""

import contextlib
import json
import os
import secrets
import socket
import struct
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from cosmos_weightsync.deadlines import Deadline
from cosmos_weightsync.errors import (
    DeadlineError,
    PeerLostError,
    ProtocolError,
    TransportUnavailableError,
)
from cosmos_weightsync.forking import closed_in_children
from cosmos_weightsync.frames import recv_exactly
from cosmos_weightsync.transports.contract import Channel, PendingChannel, Side

__all__ = ["HostConnection", "prepare_on_host"]

_CREDENTIALS = struct.Struct("3i")
_LENGTH = struct.Struct("!Q")


class HostConnection:
    """A connected Unix socket. Used by one thread at a time, except `close`.

    Attributes:
        peer: Who is at the other end, for error messages.
        process: Its process id, in this process's namespace.
    """

    def __init__(self, connection: socket.socket, role: str) -> None:
        self._socket = closed_in_children(connection)
        self._sending, self._receiving = threading.Lock(), threading.Lock()
        self.process, self._user = _peer_of(connection)
        self.peer = f"{role} process {self.process}"

    def check_user(self) -> None:
        """Refuse a process of another user.

        Raises:
            ProtocolError: it is one.
        """
        if self._user != os.getuid():
            raise ProtocolError(f"{self.peer} is of user {self._user}, this one of {os.getuid()}")

    def send(self, data: bytes, deadline: Deadline, descriptors: Sequence[int] = ()) -> None:
        """Send bytes, with file descriptors beside the first of them.

        Raises:
            PeerLostError: the peer is gone.
            DeadlineError: it does not take them.
        """
        left = deadline.remaining(self.peer)
        try:
            with self._sending:
                self._socket.settimeout(left)
                if descriptors:
                    count = socket.send_fds(self._socket, [data], list(descriptors))
                    data = data[count:]
                self._socket.sendall(data)
        except TimeoutError as error:
            raise DeadlineError(f"{self.peer} does not listen") from error
        except OSError as error:
            raise PeerLostError(f"{self.peer} is gone: {error}") from error

    def receive(self, size: int, deadline: Deadline) -> bytes:
        """Take exactly so many bytes.

        Raises:
            PeerLostError: the peer is gone.
            DeadlineError: they do not come.
        """
        found = bytearray(size)
        with self._receiving:
            recv_exactly(self._socket, memoryview(found), deadline, self.peer)
        return bytes(found)

    def receive_some(self, most: int, deadline: Deadline) -> int:
        """Take what is there, at least one byte; returns how many.

        Raises:
            PeerLostError: the peer is gone.
            DeadlineError: nothing comes.
        """
        left = deadline.remaining(self.peer)
        try:
            with self._receiving:
                self._socket.settimeout(left)
                found = self._socket.recv(most)
        except TimeoutError as error:
            raise DeadlineError(f"{self.peer} did not take the bytes in time") from error
        except OSError as error:
            raise PeerLostError(f"{self.peer} is gone: {error}") from error
        if not found:
            raise PeerLostError(f"{self.peer} closed the channel")
        return len(found)

    def send_json(self, value: Any, deadline: Deadline, descriptors: Sequence[int] = ()) -> None:
        """Send a JSON value; raises as `send`."""
        body = json.dumps(value).encode()
        self.send(_LENGTH.pack(len(body)) + body, deadline, descriptors)

    def receive_json(self, deadline: Deadline) -> tuple[Any, list[int]]:
        """Take a JSON value and the descriptors beside it, which the caller must close.

        Raises:
            ProtocolError: it is not JSON.
        """
        left = deadline.remaining(self.peer)
        descriptors: list[int] = []
        try:
            with self._receiving:
                self._socket.settimeout(left)
                head, descriptors, _, _ = socket.recv_fds(self._socket, _LENGTH.size, 1)
            if not head:
                raise PeerLostError(f"{self.peer} closed the channel")
            head += self.receive(_LENGTH.size - len(head), deadline)
            return json.loads(self.receive(_LENGTH.unpack(head)[0], deadline)), descriptors
        except BaseException as error:
            for descriptor in descriptors:
                os.close(descriptor)
            if isinstance(error, TimeoutError):
                raise DeadlineError(f"nothing from {self.peer} in time") from error
            if isinstance(error, OSError):
                raise PeerLostError(f"{self.peer} is gone: {error}") from error
            if isinstance(error, ValueError):
                raise ProtocolError(f"{self.peer} sent something that is not JSON") from error
            raise

    def close(self) -> None:
        """Hang up; a thread that waits at either end wakes. May be repeated."""
        with contextlib.suppress(OSError):  # Not connected any more is what is asked for.
            self._socket.shutdown(socket.SHUT_RDWR)
        with self._sending, self._receiving:  # What is opened next may get the same descriptor.
            self._socket.close()


def _peer_of(connection: socket.socket) -> tuple[int, int]:
    """Process and user at the other end of a Unix socket."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    process, user, _ = _CREDENTIALS.unpack(raw)
    return process, user


MakeChannel = Callable[[HostConnection, Deadline], Channel]


class _Offering:
    """The sender's end: waits for a process of the same user."""

    def __init__(self, make: MakeChannel) -> None:
        self._make = make
        self._address = f"cosmos-weightsync-{secrets.token_hex(16)}"
        self._listener = closed_in_children(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        self._listener.bind(f"\0{self._address}")
        self._listener.listen(1)

    @property
    def description(self) -> Mapping[str, Any]:
        return {"address": self._address}

    def connect(self, peer: Mapping[str, Any], deadline: Deadline) -> Channel:
        with self._listener:
            left = deadline.remaining("the receiver to attach")
            try:
                self._listener.settimeout(left)
                accepted, _ = self._listener.accept()
            except TimeoutError as error:
                raise DeadlineError("the receiver did not attach in time") from error
            except OSError as error:
                raise PeerLostError(f"no receiver attached: {error}") from error
        return _made(self._make, HostConnection(accepted, "receiver"), deadline)

    def close(self) -> None:
        with contextlib.suppress(OSError):  # Closing alone would leave `accept` waiting.
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


class _Attaching:
    """The receiver's end."""

    def __init__(self, make: MakeChannel) -> None:
        self._make = make

    @property
    def description(self) -> Mapping[str, Any]:
        return {}

    def connect(self, peer: Mapping[str, Any], deadline: Deadline) -> Channel:
        left = deadline.remaining("the sender on this host")
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.settimeout(left)
            connection.connect(f"\0{peer.get('address')}")
        except TimeoutError as error:
            connection.close()
            raise DeadlineError("the sender on this host does not answer") from error
        except OSError as error:
            connection.close()
            raise TransportUnavailableError(
                f"no meeting with the sender, is it on this host? {error}"
            ) from error
        return _made(self._make, HostConnection(connection, "sender"), deadline)

    def close(self) -> None:
        """Nothing is open yet."""


def _made(make: MakeChannel, connection: HostConnection, deadline: Deadline) -> Channel:
    try:
        connection.check_user()
        return make(connection, deadline)
    except BaseException:
        connection.close()
        raise


def prepare_on_host(
    name: str, side: Side, *, sending: MakeChannel, receiving: MakeChannel
) -> PendingChannel:
    """One end of a channel inside this host.

    Args:
        name: Of the transport, for the error.
        side: Which end.
        sending: Makes the sender's channel of the connection.
        receiving: Makes the receiver's.

    Raises:
        TransportUnavailableError: not on this system.
    """
    if sys.platform != "linux":
        raise TransportUnavailableError(f"{name!r} needs Linux; use 'tcp'")
    return _Offering(sending) if side == "sender" else _Attaching(receiving)
