"""The control connection: JSON values with a length in front, over one TCP socket.

No pickle and no code ever crosses it. A frame is 4 bytes of big-endian length and then UTF-8
JSON; it is always an object with a ``kind``.
"""

import contextlib
import ipaddress
import json
import socket
import struct
import threading
from collections.abc import Mapping
from typing import Any

from cosmos_weightsync import errors
from cosmos_weightsync.deadlines import Deadline
from cosmos_weightsync.errors import (
    ConfigurationError,
    DeadlineError,
    PeerLostError,
    ProtocolError,
    TransferError,
    WeightSyncError,
)
from cosmos_weightsync.forking import closed_in_children

__all__ = [
    "MAX_HELLO_BYTES",
    "ControlConnection",
    "connect_control",
    "is_loopback",
    "parse_endpoint",
    "recv_exactly",
]

MAX_FRAME_BYTES = 1 << 28
"""A layout of 100,000 tensors takes a few MB; anything near this is not ours."""
MAX_HELLO_BYTES = 1 << 16
"""What somebody may say who has not shown the token yet."""
MAX_PORT = 65535

_LENGTH = struct.Struct("!I")


class ControlConnection:
    """One end of a control connection. Used by one thread at a time, except `close`.

    Args:
        connection: A connected stream socket; owned from now on.
        peer: Who is at the other end, for error messages.

    Attributes:
        is_known: Whether the other end has said hello, with the token.
    """

    def __init__(self, connection: socket.socket, peer: str) -> None:
        self.is_known = False
        self._socket = closed_in_children(connection)
        self._sending, self._receiving = threading.Lock(), threading.Lock()
        self.peer = peer
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)

    def send(self, kind: str, content: Mapping[str, Any], deadline: Deadline) -> None:
        """Send one frame.

        Raises:
            PeerLostError: the peer is gone.
            DeadlineError: it does not take the frame in time.
        """
        body = json.dumps({"kind": kind, **content}).encode()
        left = deadline.remaining(f"{self.peer} to take {kind!r}")
        try:
            with self._sending:
                self._socket.settimeout(left)
                self._socket.sendall(_LENGTH.pack(len(body)) + body)
        except TimeoutError as error:
            raise DeadlineError(f"{self.peer} did not take {kind!r} in time") from error
        except OSError as error:
            raise PeerLostError(f"{self.peer} is gone: {error}") from error

    def receive(
        self, deadline: Deadline, *, expect: str | None = None, most_bytes: int = MAX_FRAME_BYTES
    ) -> dict[str, Any]:
        """Take the next frame.

        Args:
            deadline: When to give up.
            expect: The only kind that is right here; any when omitted.
            most_bytes: A longer frame is refused before any of it is read.

        Raises:
            PeerLostError: the peer closed the connection.
            DeadlineError: nothing came in time.
            ProtocolError: what came is no frame, or of another kind.
            WeightSyncError: the peer reports an error of its own, of this class.
        """
        (length,) = _LENGTH.unpack(self._exactly(_LENGTH.size, expect, deadline))
        if length > most_bytes:
            raise ProtocolError(
                f"{self.peer} announces a frame of {length} bytes: what answers there is something "
                "else than a sender or receiver of this library"
            )
        try:
            frame = json.loads(self._exactly(length, expect, deadline))
            kind = frame["kind"]
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise ProtocolError(f"{self.peer} sent something that is not a frame") from error
        if kind == "error":
            raise _reported(self.peer, frame)
        if expect is not None and kind != expect:
            raise ProtocolError(f"{self.peer} sent {kind!r} where {expect!r} was due")
        return frame

    def send_bytes(self, content: memoryview, deadline: Deadline) -> None:
        """Send bytes that a frame has announced.

        Raises:
            PeerLostError: the peer is gone.
            DeadlineError: it does not take them in time.
        """
        try:
            with self._sending:
                self._socket.settimeout(deadline.remaining(self.peer))
                self._socket.sendall(content)
        except TimeoutError as error:
            raise DeadlineError(f"{self.peer} did not take {len(content)} bytes in time") from error
        except OSError as error:
            raise PeerLostError(f"{self.peer} is gone: {error}") from error

    def receive_into(self, view: memoryview, deadline: Deadline) -> None:
        """Take bytes that a frame has announced.

        Raises:
            PeerLostError: the peer closed the connection.
            DeadlineError: they did not come in time.
        """
        with self._receiving:
            recv_exactly(self._socket, view, deadline, self.peer)

    def close(self) -> None:
        """Close; a thread that waits on this end wakes with `PeerLostError`. May be repeated."""
        with contextlib.suppress(OSError):  # Not connected any more is what is asked for.
            self._socket.shutdown(socket.SHUT_RDWR)
        with self._sending, self._receiving:  # What is opened next may get the same descriptor.
            self._socket.close()

    def _exactly(self, size: int, expect: str | None, deadline: Deadline) -> bytes:
        buffer = bytearray(size)
        with self._receiving:
            recv_exactly(self._socket, memoryview(buffer), deadline, f"{self.peer} ({expect})")
        return bytes(buffer)


def _reported(peer: str, frame: Mapping[str, Any]) -> WeightSyncError:
    """The peer's error, raised here under its own class where that is one of ours."""
    kind = getattr(errors, str(frame.get("class")), TransferError)
    if not (isinstance(kind, type) and issubclass(kind, WeightSyncError)):
        kind = TransferError
    return kind(f"{peer} says: {frame.get('message', 'no reason given')}")


def recv_exactly(
    connection: socket.socket, view: memoryview, deadline: Deadline, peer: str
) -> None:
    """Fill ``view`` from a stream socket.

    Raises:
        PeerLostError: the stream ended first.
        DeadlineError: it took too long.
    """
    filled = 0
    while filled < len(view):
        left = deadline.remaining(peer)
        try:
            connection.settimeout(left)
            count = connection.recv_into(view[filled:])
        except TimeoutError as error:
            raise DeadlineError(f"nothing from {peer} in time") from error
        except OSError as error:
            raise PeerLostError(f"{peer} is gone: {error}") from error
        if count == 0:
            raise PeerLostError(f"{peer} closed the connection")
        filled += count


def parse_endpoint(endpoint: str) -> tuple[str, int]:
    """Split ``host:port``; an IPv6 host stands in brackets.

    Raises:
        ConfigurationError: it is not of that form.
    """
    host, separator, port = endpoint.rpartition(":")
    if not separator or not port.isdecimal() or not host or int(port) > MAX_PORT:
        raise ConfigurationError(
            f"endpoint {endpoint!r} is not of the form host:port, with a port up to {MAX_PORT}"
        )
    return host.strip("[]"), int(port)


def join_endpoint(host: str, port: int) -> str:
    """Return ``host:port``, as `parse_endpoint` takes it apart."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    """Whether an address can be reached from this host only."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def listen(host: str, port: int = 0, *, backlog: int = 1) -> socket.socket:
    """Return a socket that listens on an address of IPv4 or IPv6, or on a name's.

    Raises:
        OSError: it cannot be listened on.
    """
    kind = socket.SOCK_STREAM
    found = socket.getaddrinfo(host or None, port, type=kind, flags=socket.AI_PASSIVE)
    family, *_ = found[0]
    return closed_in_children(socket.create_server((host, port), family=family, backlog=backlog))


def _hint(host: str, error: Exception) -> str:
    if not isinstance(error, ConnectionRefusedError):
        return ""
    if is_loopback(host):
        return (
            "; nobody listens there on this host: the sender has ended, or it is on another host "
            "and was given no address of that one (SenderConfig.bind_host, with a token; of 'push' "
            "--host)"
        )
    return "; nobody listens there any more"


def connect_control(endpoint: str, deadline: Deadline) -> ControlConnection:
    """Connect to a sender's endpoint.

    Raises:
        PeerLostError: nobody listens there.
        DeadlineError: the host does not answer.
    """
    peer, address = f"sender at {endpoint}", parse_endpoint(endpoint)
    try:
        connection = socket.create_connection(address, timeout=deadline.remaining(peer))
    except TimeoutError as error:
        raise DeadlineError(
            f"{peer} does not answer: is there a way to that host, and no firewall before the port?"
        ) from error
    except (OSError, UnicodeError) as error:  # The latter of what can be no host's name.
        raise PeerLostError(
            f"{peer} cannot be reached: {error}{_hint(address[0], error)}"
        ) from error
    return ControlConnection(connection, peer)
