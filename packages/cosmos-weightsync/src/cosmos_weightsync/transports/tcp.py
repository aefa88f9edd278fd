"""Over a TCP connection of its own: works between any two hosts, and sees a dead peer at once."""

import contextlib
import hmac
import secrets
import select
import socket
import struct
import threading
from collections.abc import Generator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cosmos_weightsync.byte_rows import lent_bytes
from cosmos_weightsync.checksums import RunningChecksum
from cosmos_weightsync.deadlines import Deadline
from cosmos_weightsync.errors import DeadlineError, PeerLostError, TransportUnavailableError
from cosmos_weightsync.forking import closed_in_children
from cosmos_weightsync.frames import listen
from cosmos_weightsync.streaming import CompiledRows, PlainRows, StreamMoves, row_engine
from cosmos_weightsync.transports.contract import Capabilities, PendingChannel, Side
from cosmos_weightsync.transports.near_sockets import unpace

__all__ = ["TcpTransport", "prepare_tcp"]

_KEY_BYTES = 16
_LONGEST_POLL_S = 3600.0  # poll takes a number of 32 bits; it is asked again
_MOST_CALLERS = 16
_TIME = struct.Struct("@ll")
"""``struct timeval``: seconds and microseconds."""
_RESET = struct.pack("@ii", 1, 0)
"""``struct linger``: on, for no time."""
_CAPABILITIES = Capabilities(direct_bytes=64 << 10, message_bytes=8 << 20)


class _TcpChannel:
    """One end of a connection.

    The system watches the clock, not Python: a read then is one call for a whole message, where
    Python's own timeouts take two for every few hundred KiB.
    """

    def __init__(self, connection: socket.socket, peer: str, compiled: CompiledRows | None) -> None:
        self._compiled = compiled
        self._socket = closed_in_children(connection)
        self._peer = peer
        # Held while a call has the descriptor, whose number, once closed, is soon somebody else's.
        self._lent = threading.Lock()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        unpace(connection)
        connection.settimeout(None)

    @property
    def capabilities(self) -> Capabilities:
        return _CAPABILITIES

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    def send(self, view: Tensor, deadline: Deadline) -> None:
        left = lent_bytes(view).data
        while left:
            with self._sending(deadline):
                left = left[self._socket.send(left) :]

    def recv_into(self, view: Tensor, deadline: Deadline) -> None:
        left = lent_bytes(view).data
        while left:
            with self._receiving(deadline):
                count = self._socket.recv_into(left, len(left), socket.MSG_WAITALL)
                if count == 0:
                    raise EOFError
            left = left[count:]

    @property
    def compiled(self) -> CompiledRows | None:
        return self._compiled

    def send_rows(self, rows: np.ndarray, deadline: Deadline) -> None:
        engine = self._compiled
        if engine is None:
            self.send(torch.from_numpy(np.ascontiguousarray(rows).reshape(-1)), deadline)
        else:
            self.send_moves(engine.prepare_send([rows]), deadline)

    def send_moves(self, moves: StreamMoves, deadline: Deadline) -> None:
        with self._sending(deadline) as stream:
            moves.make(stream, deadline.at)

    def recv_hashed(self, into: np.ndarray, checksum: RunningChecksum, deadline: Deadline) -> None:
        engine, state = self._compiled, checksum.compiled
        if engine is None or state is None:
            self.recv_into(torch.from_numpy(into), deadline)
            checksum.add_bytes(into)
            return
        with self._receiving(deadline) as stream:
            engine.receive(state, into, stream, deadline.at)

    def recv_moves(self, moves: StreamMoves, deadline: Deadline) -> list[int]:
        with self._receiving(deadline) as stream:
            return moves.make(stream, deadline.at)

    @contextlib.contextmanager
    def _sending(self, deadline: Deadline) -> Generator[int]:
        """The descriptor, while it is written to."""
        try:
            with self._lent:
                self._limit(socket.SO_SNDTIMEO, deadline)
                yield self._socket.fileno()
        except BlockingIOError as error:
            raise DeadlineError(f"{self._peer} did not take the bytes in time") from error
        except OSError as error:
            raise PeerLostError(f"{self._peer} is gone: {error}") from error

    @contextlib.contextmanager
    def _receiving(self, deadline: Deadline) -> Generator[int]:
        """The descriptor, while it is read from."""
        try:
            with self._lent:
                self._limit(socket.SO_RCVTIMEO, deadline)
                yield self._socket.fileno()
        except EOFError as error:
            raise PeerLostError(f"{self._peer} closed the connection") from error
        except BlockingIOError as error:
            raise DeadlineError(f"nothing from {self._peer} in time") from error
        except OSError as error:
            raise PeerLostError(f"{self._peer} is gone: {error}") from error

    def _limit(self, option: int, deadline: Deadline) -> None:
        """Have the next call on the socket end in time, without bytes if need be."""
        microseconds = max(1, int(1e6 * deadline.remaining(self._peer)))
        try:
            self._socket.setsockopt(
                socket.SOL_SOCKET, option, _TIME.pack(*divmod(microseconds, 10**6))
            )
        except OSError as error:
            raise PeerLostError(f"{self._peer}: this end of the channel is closed") from error

    def close(self) -> None:
        with contextlib.suppress(OSError):  # Not connected any more is what is asked for.
            self._socket.shutdown(socket.SHUT_RDWR)
        with self._lent:  # Whoever waits is awake now, and soon done.
            self._socket.close()


class _Listening:
    """The sender's end: accepts the one connection that shows the key, among any others."""

    def __init__(self, host: str) -> None:
        self._listener = listen(host, backlog=_MOST_CALLERS)
        self._key = secrets.token_hex(_KEY_BYTES).encode()
        self._address = (host, int(self._listener.getsockname()[1]))

    @property
    def description(self) -> Mapping[str, Any]:
        return {"host": self._address[0], "port": self._address[1], "key": self._key.decode()}

    def meet(self, peer: Mapping[str, Any], deadline: Deadline) -> tuple[socket.socket, str]:
        callers: dict[socket.socket, bytearray] = {}  # What each of them has shown so far.
        try:
            return self._await_key(callers, deadline)
        except (OSError, ValueError) as error:  # The latter of a listener that is closed.
            raise PeerLostError(f"no receiver connected: {error}") from error
        finally:
            for caller in callers:
                caller.close()
            self._listener.close()

    def _await_key(
        self, callers: dict[socket.socket, bytearray], deadline: Deadline
    ) -> tuple[socket.socket, str]:
        """Hear whoever calls until one has shown the key; it is taken out of the callers."""
        self._listener.setblocking(False)
        while True:
            left = deadline.remaining("the receiver to connect")
            poll = select.poll()
            by_number = {each.fileno(): each for each in (self._listener, *callers)}
            for number in by_number:
                poll.register(number, select.POLLIN)
            for number, _ in poll.poll(1e3 * min(left, _LONGEST_POLL_S)):
                caller = by_number[number]
                if caller is self._listener:
                    self._welcome(callers)
                elif caller in callers and self._shows_key(caller, callers):
                    name = f"receiver at {caller.getpeername()}"  # Fails if it is gone again.
                    caller.setblocking(True)
                    del callers[caller]
                    return caller, name

    def _welcome(self, callers: dict[socket.socket, bytearray]) -> None:
        with contextlib.suppress(BlockingIOError, ConnectionAbortedError):  # Gone meanwhile.
            caller, _ = self._listener.accept()
            caller.setblocking(False)
            callers[caller] = bytearray()
        while len(callers) > _MOST_CALLERS:  # The one that says nothing for longest.
            oldest = next(iter(callers))
            del callers[oldest]
            oldest.close()

    def _shows_key(self, caller: socket.socket, callers: dict[socket.socket, bytearray]) -> bool:
        """Take what it says; a stranger is hung up on."""
        shown = callers[caller]
        try:
            said = caller.recv(len(self._key) - len(shown))
        except BlockingIOError:
            return False
        except OSError:
            said = b""
        shown += said
        if said and len(shown) < len(self._key):
            return False
        if hmac.compare_digest(shown, self._key):
            return True
        del callers[caller]
        caller.close()
        return False

    def close(self) -> None:
        with contextlib.suppress(OSError):  # Closing alone would leave `poll` waiting.
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


class _Connecting:
    """The receiver's end."""

    @property
    def description(self) -> Mapping[str, Any]:
        return {}

    def meet(self, peer: Mapping[str, Any], deadline: Deadline) -> tuple[socket.socket, str]:
        address = (str(peer.get("host")), int(peer.get("port", 0)))
        name = f"sender at {address}"
        with contextlib.ExitStack() as failed:
            try:
                connection = socket.create_connection(address, timeout=deadline.remaining(name))
                failed.callback(connection.close)
                connection.sendall(str(peer.get("key")).encode())
            except TimeoutError as error:
                raise DeadlineError(f"{name} does not answer") from error
            except OSError as error:
                raise PeerLostError(f"{name} cannot be reached: {error}") from error
            failed.pop_all()
        return connection, name

    def close(self) -> None:
        """Nothing is open yet."""


def prepare_tcp(side: Side, host: str) -> _Listening | _Connecting:
    """One end of a TCP connection that only the other end can join: `meet` gives the socket.

    Raises:
        TransportUnavailableError: the address cannot be listened on.
    """
    if side == "receiver":
        return _Connecting()
    try:
        return _Listening(host)
    except OSError as error:
        raise TransportUnavailableError(f"cannot listen on {host}: {error}") from error


class _PendingTcp:
    def __init__(self, side: Side, host: str, compiled: CompiledRows | None) -> None:
        self._side: Side = side
        self._end = prepare_tcp(side, host)
        self._compiled = compiled

    @property
    def description(self) -> Mapping[str, Any]:
        return self._end.description

    def connect(self, peer: Mapping[str, Any], deadline: Deadline) -> _TcpChannel:
        connection, name = self._end.meet(peer, deadline)
        if self._side == "receiver":
            # Closing resets the connection: without unread bytes it would merely be shut, and a
            # sender that waits for room would not learn of it.
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        return _TcpChannel(connection, name, self._compiled)

    def close(self) -> None:
        self._end.close()


class TcpTransport:
    """One TCP connection per channel; the sender listens.

    Args:
        rows: What moves rows of bytes; by default the compiled library, where there is one.
    """

    def __init__(self, rows: PlainRows | CompiledRows | None = None) -> None:
        engine = rows or row_engine()
        self._compiled = engine if isinstance(engine, CompiledRows) else None

    @property
    def name(self) -> str:
        """``tcp``."""
        return "tcp"

    @property
    def capabilities(self) -> Capabilities:
        """Pieces of some size go from where they lie into place, and are hashed on arrival."""
        return _CAPABILITIES

    def prepare(self, side: Side, host: str) -> PendingChannel:
        """Listen on ``host`` as the sender; nothing yet as the receiver."""
        return _PendingTcp(side, host, self._compiled)
