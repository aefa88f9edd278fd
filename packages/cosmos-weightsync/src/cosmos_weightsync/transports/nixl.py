"""Over NIXL (UCX): the receiver reads the sender's registered memory, by RDMA where there is any.

```
sender                                          receiver
"message": address, size [+ new registration] ─► posts a READ straight into place
                                        "read" ◄─ done
```
The frames go over a TCP connection of their own. Strided and small pieces come packed in a bucket,
since a network card wants few descriptors. NIXL runs no thread of its own here: whoever waits makes
it go on, so that nothing spins between transfers.
"""

import base64
import contextlib
import importlib
import os
import secrets
import select
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from cosmos_weightsync.deadlines import Deadline
from cosmos_weightsync.errors import PeerLostError, ProtocolError, TransportUnavailableError
from cosmos_weightsync.frames import ControlConnection
from cosmos_weightsync.transports.contract import Capabilities, PendingChannel, Side
from cosmos_weightsync.transports.tcp import prepare_tcp

__all__ = ["NixlTransport"]


def _rdma_devices() -> list[str]:
    """The network cards of this machine that read remote memory by themselves."""
    with contextlib.suppress(OSError):
        return sorted(os.listdir("/sys/class/infiniband"))
    return []


_CAPABILITIES = Capabilities(
    direct_bytes=1 << 20,  # a read by itself takes 0.3 ms between processes of one host
    message_bytes=8 << 20,
    groups=2,
    registers=True,
)
_MODULES = ("nixl_cu12._api", "nixl_cu13._api", "nixl._api")
"""The wheels of the CUDA versions; the plain name refuses to load beside some CUDA bindings."""

_PAUSE_S = 50e-6


def _nixl() -> Any:
    """NIXL's Python interface; it has no stubs.

    Raises:
        TransportUnavailableError: it is not installed.
    """
    reasons: list[str] = []
    for name in _MODULES:
        try:
            return importlib.import_module(name)
        except ImportError as error:
            reasons.append(str(error))
    raise TransportUnavailableError(
        f"'nixl' needs NIXL: pip install 'cosmos-weightsync[nixl]' ({'; '.join(reasons)})"
    )


class _Agent:
    """A NIXL agent and what is registered with it. Used by one thread at a time."""

    def __init__(self, api: Any) -> None:
        config = api.nixl_agent_config(enable_prog_thread=False)
        self.name = f"cosmos-weightsync-{secrets.token_hex(8)}"
        self._agent: Any = api.nixl_agent(self.name, config)
        found = [value for name, value in vars(api.nixlBind).items() if name.endswith("Error")]
        self._failures: tuple[type[Exception], ...] = tuple(found)
        # The tensors are kept, so that the memory is not given to somebody else meanwhile.
        self._registered: dict[tuple[int, int], Tensor] = {}
        self._is_told = False
        self._peer: Any = None

    def register(self, view: Tensor) -> None:
        """Register the memory that a view is part of, once."""
        storage = view.untyped_storage()
        key = (storage.data_ptr(), storage.nbytes())
        if key not in self._registered:
            self._agent.register_memory([(*key, 0, "")], "DRAM")
            self._registered[key] = view
            self._is_told = False

    def news(self) -> str | None:
        """What the peer must know of this agent, if it does not know it yet."""
        if self._is_told:
            return None
        self._is_told = True
        return base64.b64encode(self._agent.get_agent_metadata()).decode()

    def learn(self, news: str) -> None:
        """What the peer said."""
        self._peer = self._agent.add_remote_agent(base64.b64decode(news))

    def go_on(self) -> None:
        """Let transfers that others wait for make progress."""
        self._agent.get_new_notifs()

    def read(self, address: int, into: Tensor) -> Callable[[], bool]:
        """Start to read; what this returns says whether it is done."""
        size = into.numel()
        local = self._agent.get_xfer_descs([(into.data_ptr(), size, 0)], "DRAM")
        remote = self._agent.get_xfer_descs([(address, size, 0)], "DRAM")
        try:
            handle = self._agent.initialize_xfer("READ", local, remote, self._peer)
            state = self._agent.transfer(handle)
        except self._failures as error:
            raise PeerLostError(f"cannot read the sender's memory: {error}") from error

        def is_done() -> bool:
            nonlocal state
            try:
                if state == "PROC":
                    state = self._agent.check_xfer_state(handle)
                if state == "PROC":
                    return False
                self._agent.release_xfer_handle(handle)
            except self._failures as error:
                raise PeerLostError(f"reading the sender's memory failed: {error}") from error
            if state != "DONE":
                raise PeerLostError(f"reading the sender's memory ended in state {state}")
            return True

        return is_done


class _NixlChannel:
    def __init__(
        self, agent: _Agent, connection: socket.socket, peer: str, capabilities: Capabilities
    ) -> None:
        self._agent = agent
        self._capabilities = capabilities
        self._socket = connection
        self._control = ControlConnection(connection, peer)
        self._peer = peer
        self._num_sent = self._num_read = 0
        self._due: list[Tensor] = []
        self._posted: list[Callable[[], bool]] = []
        self._num_due = self._num_here = 0

    @property
    def capabilities(self) -> Capabilities:
        return self._capabilities

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    def send(self, view: Tensor, deadline: Deadline) -> None:
        self.begin_send(view, deadline)()

    def recv_into(self, view: Tensor, deadline: Deadline) -> None:
        self.begin_recv(view, deadline)()

    def begin_send(self, view: Tensor, deadline: Deadline) -> Callable[[], None]:
        self._agent.register(view)
        message = {"address": view.data_ptr(), "size": view.numel(), "agent": self._agent.news()}
        self._control.send("message", message, deadline)
        self._num_sent += 1
        number = self._num_sent

        def wait() -> None:
            while self._num_read < number:
                self._agent.go_on()
                if self._has_frame(_PAUSE_S):
                    self._control.receive(deadline, expect="read")
                    self._num_read += 1
                deadline.remaining(self._peer)

        return wait

    def begin_recv(self, view: Tensor, deadline: Deadline) -> Callable[[], None]:
        self._agent.register(view)
        self._due.append(view)
        self._num_due += 1
        number = self._num_due

        def wait() -> None:
            while self._num_here < number:
                self._read_oldest(deadline)
                self._num_here += 1

        return wait

    def close(self) -> None:
        self._control.close()

    def _read_oldest(self, deadline: Deadline) -> None:
        if not self._posted:
            self._post(deadline)
        is_done = self._posted.pop(0)
        while not is_done():
            if self._due and self._has_frame(0.0):
                self._post(deadline)
            deadline.remaining(self._peer)
            time.sleep(_PAUSE_S)
        self._control.send("read", {}, deadline)

    def _post(self, deadline: Deadline) -> None:
        """Take the sender's next message and start to read it to where it is due."""
        frame = self._control.receive(deadline, expect="message")
        view = self._due.pop(0)
        try:
            address, size, news = int(frame["address"]), int(frame["size"]), frame["agent"]
            if news is not None:
                self._agent.learn(str(news))
        except (KeyError, TypeError, ValueError) as error:
            raise ProtocolError(f"{self._peer} sent a malformed message") from error
        if size != view.numel():
            raise ProtocolError(f"{self._peer} sent {size} bytes where {view.numel()} were due")
        self._posted.append(self._agent.read(address, view))

    def _has_frame(self, seconds: float) -> bool:
        """Whether the peer said something, or is gone."""
        try:
            return bool(select.select([self._socket], [], [], seconds)[0])
        except (OSError, ValueError) as error:
            raise PeerLostError("this end of the channel is closed") from error


class _PendingNixl:
    def __init__(self, api: Any, side: Side, host: str, capabilities: Capabilities) -> None:
        self._api = api
        self._capabilities = capabilities
        self._pending = prepare_tcp(side, host)

    @property
    def description(self) -> Mapping[str, Any]:
        return self._pending.description

    def connect(self, peer: Mapping[str, Any], deadline: Deadline) -> _NixlChannel:
        connection, name = self._pending.meet(peer, deadline)
        try:
            return _NixlChannel(_Agent(self._api), connection, name, self._capabilities)
        except self._api.nixlBind.nixlBackendError as error:
            connection.close()
            raise TransportUnavailableError(f"NIXL has no backend here: {error}") from error

    def close(self) -> None:
        self._pending.close()


class NixlTransport:
    """Reads the sender's memory through NIXL and UCX: RDMA, TCP or shared memory, as there is.

    Host memory only; `is_installed` says whether it can be used here. Needs
    ``pip install 'cosmos-weightsync[nixl]'`` on both sides.
    """

    def __init__(self) -> None:
        # Without RDMA, UCX copies more often than sockets do.
        copies = 0 if _rdma_devices() else 3
        self._capabilities = replace(_CAPABILITIES, copies=copies)

    @staticmethod
    def is_installed() -> bool:
        """Whether this environment has NIXL, without loading it."""
        return any(find_spec(name.partition(".")[0]) is not None for name in _MODULES)

    @property
    def name(self) -> str:
        """``nixl``."""
        return "nixl"

    @property
    def capabilities(self) -> Capabilities:
        """Registered memory, few large messages, two at a time."""
        return self._capabilities

    def prepare(self, side: Side, host: str) -> PendingChannel:
        """Listen on ``host`` as the sender; nothing yet as the receiver."""
        return _PendingNixl(_nixl(), side, host, self._capabilities)
