"""The directory: a meeting point that anybody can host, and that no byte of a weight passes.

```
member                        directory
join(member, layout)    ─►    ◄─ view        again when anything about it changes
sync(id, revision, wait)─►    ◄─ view        at once if it changed since, else after the wait
hold(id, version, run)  ─►    ◄─ view        "I have this version whole"
layout(digest)          ─►    ◄─ layout
vote(id, version, …)    ─►    ◄─ voted       waits a little for the group's decision
leave(id)               ─►    ◄─ view
```
A `sync` renews the lease. A directory that dies takes nothing with it: transfers go on, members
keep the view they had, and join the next directory at the same address, which starts empty.
"""

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from cosmos_weightsync.ballots import Content, Quorum, Vote
from cosmos_weightsync.deadlines import Deadline
from cosmos_weightsync.errors import (
    ConfigurationError,
    DeadlineError,
    ProtocolError,
    WeightSyncError,
)
from cosmos_weightsync.frames import ControlConnection
from cosmos_weightsync.links import Links
from cosmos_weightsync.membership import Member, MembershipTable, View
from cosmos_weightsync.server import Server, check_exposure, complain, receive_hello

__all__ = ["WeightDirectory"]

IDLE_S = 600.0
MOST_WAIT_S = 30.0


class WeightDirectory:
    """Serves the membership of senders and receivers until closed.

    Args:
        bind_host: The address to listen on, and the one members are told.
        port: The port; 0 takes a free one. A directory that may be restarted needs a fixed one.
        token: Members must show it. Must be given if ``bind_host`` is not loopback.
        lease_s: A member that is silent for so long is forgotten.
        links: How fast the links between members are, for groups that plan together
            (``ReceiverConfig(prefer="planned")``); those of H100 nodes by default.

    Raises:
        ConfigurationError: the address cannot be listened on, or needs a token.

    Example:
        >>> directory = WeightDirectory()
        >>> config = SenderConfig(directory=directory.endpoint)
    """

    def __init__(
        self,
        *,
        bind_host: str = "127.0.0.1",
        port: int = 0,
        token: str = "",
        lease_s: float = 10.0,
        links: Links | None = None,
    ) -> None:
        check_exposure(bind_host, token)
        if lease_s <= 0:
            raise ConfigurationError(f"a lease of {lease_s} s")
        self._state = _Shared(MembershipTable(lease_s, links), token, lease_s)
        self._server = Server(
            (bind_host, port), lambda c: _Conversation(self._state, c), "weight-directory"
        )

    @property
    def endpoint(self) -> str:
        """Where members find it: ``host:port``."""
        return self._server.endpoint

    @property
    def view(self) -> View:
        """Everybody who is here now."""
        with self._state.changed:
            self._state.table.expire(time.monotonic())
            return self._state.table.view()

    def close(self, timeout_s: float = 10.0) -> None:
        """End all threads; members keep what they know. May be repeated.

        Raises:
            DeadlineError: a thread did not end in time.
        """
        with self._state.changed:
            self._state.is_closed = True
            self._state.changed.notify_all()
        self._server.close(Deadline.after(timeout_s))

    def __enter__(self) -> "WeightDirectory":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Shared:
    """What all conversations share; ``changed`` guards it."""

    def __init__(self, table: MembershipTable, token: str, lease_s: float) -> None:
        self.table = table
        self.token = token
        self.lease_s = lease_s
        self.is_closed = False
        self.changed = threading.Condition()

    def wait(self, is_ready: Callable[[], bool], deadline: Deadline) -> None:
        """Wait with the lock held, at most until the deadline; leases end meanwhile."""
        while not is_ready() and not self.is_closed:
            try:
                left = deadline.remaining("a change")
            except DeadlineError:
                return
            self.changed.wait(min(left, self.lease_s / 4))
            self.table.expire(time.monotonic())


class _Conversation:
    def __init__(self, shared: _Shared, connection: ControlConnection) -> None:
        self._shared = shared
        self._connection = connection

    def close(self) -> None:
        self._connection.close()

    def run(self) -> None:
        try:
            receive_hello(
                self._connection,
                self._shared.token,
                "the directory's: show it by SenderConfig.token or ReceiverConfig.token",
            )
            while True:
                self._answer(self._connection.receive(Deadline.after(IDLE_S)))
        except WeightSyncError as error:
            complain(self._connection, error)
        finally:
            self.close()

    def _answer(self, frame: Mapping[str, Any]) -> None:
        known: dict[str, Callable[[Mapping[str, Any]], tuple[str, dict[str, Any]]]] = {
            "join": self._join,
            "sync": self._sync,
            "hold": self._hold,
            "layout": self._layout,
            "vote": self._vote,
            "leave": self._leave,
        }
        answer = known.get(str(frame["kind"]))
        if answer is None:
            raise ProtocolError(f"a directory does not know {frame['kind']!r}")
        try:
            with self._shared.changed:
                self._shared.table.expire(time.monotonic())
                kind, content = answer(frame)
                self._shared.changed.notify_all()
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise ProtocolError(f"malformed {frame['kind']!r}: {error!r}") from error
        self._connection.send(kind, content, Deadline.after(MOST_WAIT_S))

    def _view(self) -> tuple[str, dict[str, Any]]:
        return "view", self._shared.table.view().to_json()

    def _join(self, frame: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
        member = Member.from_json(frame["member"])
        self._shared.table.join(member, frame["layout"], time.monotonic())
        return self._view()

    def _sync(self, frame: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
        table, revision = self._shared.table, int(frame["revision"])
        if not table.renew(str(frame["id"]), time.monotonic()):
            return "unknown", {}
        # Shorter than the lease: who waits here is alive.
        deadline = Deadline.after(min(float(frame["wait"]), self._shared.lease_s / 3))
        self._shared.wait(lambda: table.view().revision != revision, deadline)
        table.renew(str(frame["id"]), time.monotonic())
        return self._view()

    def _hold(self, frame: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
        member, version = str(frame["id"]), int(frame["version"])
        self._shared.table.hold(member, version, str(frame["run"]))
        return self._view()

    def _layout(self, frame: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
        return "layout", {"layout": self._shared.table.layout(str(frame["digest"]))}

    def _vote(self, frame: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
        table, member, version = self._shared.table, str(frame["id"]), int(frame["version"])
        kind = frame["quorum"]["kind"]
        quorum = Quorum(
            kind if kind in {"at_least", "each"} else "all", int(frame["quorum"]["count"])
        )
        says = str(frame["vote"])
        vote: Vote = "ready" if says == "ready" else "failed" if says == "failed" else "withdrawn"
        run_id, content = str(frame["run"]), Content.from_json(frame.get("content"))
        table.vote(member, version, vote, quorum, run_id, content=content)
        standing = table.standing(member, version, run_id)
        if standing.decision == "open" and vote == "ready" and not standing.unlike:
            self._shared.changed.notify_all()
            deadline = Deadline.after(min(float(frame["wait"]), MOST_WAIT_S))
            self._shared.wait(lambda: table.decision(member, version, run_id) != "open", deadline)
        return "voted", table.standing(member, version, run_id).to_json()

    def _leave(self, frame: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
        self._shared.table.leave(str(frame["id"]))
        return self._view()
