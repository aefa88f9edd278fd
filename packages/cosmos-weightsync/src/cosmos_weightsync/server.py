"""A listening socket and one thread per reader: how a holder is reached."""

import contextlib
import hmac
import ipaddress
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from cosmos_weightsync.deadlines import Deadline
from cosmos_weightsync.errors import (
    ConfigurationError,
    DeadlineError,
    ProtocolError,
    WeightSyncError,
)
from cosmos_weightsync.frames import (
    MAX_HELLO_BYTES,
    ControlConnection,
    is_loopback,
    join_endpoint,
    listen,
)

__all__ = [
    "Conversation",
    "Server",
    "check_address",
    "check_exposure",
    "complain",
    "is_every_address",
    "receive_hello",
]

HELLO_S = 30.0
RETRY_S = 0.05
MOST_STRANGERS = 512
"""Of more connections on which nobody has said hello, each with a thread, the oldest are closed."""
SOON_S = 1.0
"""Who means to say hello has done so by then, also where a thousand receivers start at once."""


class Conversation(Protocol):
    """What happens on one connection."""

    def run(self) -> None:
        """Talk until the other side leaves; in a thread of its own; raises nothing."""
        ...

    def close(self) -> None:
        """Make `run` return soon; from any thread. May be repeated."""
        ...


class Server:
    """Accepts connections until closed.

    Args:
        address: Host and port to listen on; port 0 takes a free one.
        converse: Makes the conversation of a new connection.
        name: Of the threads, and of the peer in errors.

    Raises:
        ConfigurationError: the address cannot be listened on.
    """

    def __init__(
        self,
        address: tuple[str, int],
        converse: Callable[[ControlConnection], Conversation],
        name: str,
    ) -> None:
        self._host = address[0]
        self._converse = converse
        self._name = name
        try:
            self._listener = listen(*address, backlog=1024)
        except (OSError, OverflowError, UnicodeError) as error:
            raise ConfigurationError(
                f"cannot listen on {address[0]}, port {address[1]}: {error}"
            ) from error
        self._port = int(self._listener.getsockname()[1])
        self._lock = threading.Lock()
        self._open: dict[threading.Thread, Conversation] = {}
        self._arrived: dict[threading.Thread, tuple[float, ControlConnection]] = {}
        self._is_closed = False
        self._acceptor = threading.Thread(target=self._accept, name=name, daemon=True)
        self._acceptor.start()

    @property
    def endpoint(self) -> str:
        """Where it is reached: ``host:port``, or ``[host]:port`` of IPv6."""
        return join_endpoint(self._host, self._port)

    @property
    def num_open(self) -> int:
        """How many conversations are going on."""
        with self._lock:
            return len(self._open)

    def close(self, deadline: Deadline) -> None:
        """Hang up on everybody and end all threads. May be repeated.

        Raises:
            DeadlineError: a thread did not end in time.
        """
        with self._lock:
            self._is_closed = True
            conversations = dict(self._open)
        with contextlib.suppress(OSError):  # Closing alone would leave `accept` waiting.
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for conversation in conversations.values():
            conversation.close()
        for thread in (self._acceptor, *conversations):
            thread.join(deadline.remaining(thread.name))
            if thread.is_alive():
                raise DeadlineError(f"thread {thread.name!r} did not end in time")

    def _accept(self) -> None:
        while True:
            try:
                connection, address = self._listener.accept()
            except OSError:  # Closed; or no descriptor is left, which passes.
                if self._is_closed:
                    return
                time.sleep(RETRY_S)
                continue
            self._welcome(ControlConnection(connection, f"receiver at {address[0]}"))

    def _welcome(self, connection: ControlConnection) -> None:
        conversation = self._converse(connection)
        thread = threading.Thread(
            target=self._run, args=(conversation,), name=f"{self._name}-session", daemon=True
        )
        with self._lock:
            if self._is_closed:
                conversation.close()
                return
            now = time.monotonic()
            unheard = self._strangers(now - SOON_S)[: 1 - MOST_STRANGERS]
            self._open[thread], self._arrived[thread] = conversation, (now, connection)
            try:
                thread.start()
            except RuntimeError:  # The system has no thread left, which passes.
                del self._open[thread], self._arrived[thread]
                unheard.append(conversation)
        for stranger in unheard:
            stranger.close()

    def _strangers(self, before: float) -> list[Conversation]:
        """Those that came before a moment and have not said hello yet, oldest first."""
        return [
            self._open[thread]
            for thread, (moment, connection) in self._arrived.items()
            if moment < before and not connection.is_known
        ]

    def _run(self, conversation: Conversation) -> None:
        try:
            conversation.run()
        finally:
            with self._lock:
                self._open.pop(threading.current_thread(), None)
                self._arrived.pop(threading.current_thread(), None)


def receive_hello(connection: ControlConnection, token: str, right: str) -> Mapping[str, Any]:
    """Wait for who has connected to say so, with the token.

    Args:
        connection: To it.
        token: What it must show.
        right: Which token that is, for the error.

    Raises:
        ProtocolError: it shows another token, or says more than a hello.
        TransferError: it says nothing, or something else.
    """
    hello = connection.receive(Deadline.after(HELLO_S), expect="hello", most_bytes=MAX_HELLO_BYTES)
    shown = str(hello.get("token", "")).encode(errors="replace")  # JSON has half characters.
    if not hmac.compare_digest(shown, token.encode()):
        raise ProtocolError(f"the token is not {right}")
    connection.is_known = True
    return hello


def complain(connection: ControlConnection, error: WeightSyncError) -> None:
    """Tell the other side why the conversation ends, as far as it still listens."""
    reason = {"class": type(error).__name__, "message": str(error)}
    with contextlib.suppress(WeightSyncError):
        connection.send("error", reason, Deadline.after(1.0))


def check_exposure(host: str, token: str) -> None:
    """Refuse to listen where strangers can connect, unless they need a token.

    Raises:
        ConfigurationError: they would not.
    """
    if not token and not is_loopback(host):
        raise ConfigurationError(
            f"listening on {host} needs a token: anybody who reaches this address could read "
            "the weights"
        )


def is_every_address(host: str) -> bool:
    """Whether a host to listen on is no address of its own, but all of this host's."""
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return host == ""


def check_address(host: str) -> None:
    """Refuse to listen on all addresses where others are told the one listened on.

    Raises:
        ConfigurationError: they would be told ``0.0.0.0``, which for them is their own host.
    """
    if is_every_address(host):
        raise ConfigurationError(
            f"{host!r} is every address of this host, and others are told the one to connect to: "
            "give the one by which they reach this host"
        )
