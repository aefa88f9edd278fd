"""A member's side of the directory: registered as long as it lives, with a view that may be old.

One thread keeps the lease and takes every change; whatever else is to be said goes over a
connection of its own. All of it goes on when the directory dies, and registers again when there
is one.
"""

import contextlib
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from cosmos_weightsync.ballots import Content, Quorum, Standing, Vote
from cosmos_weightsync.deadlines import Deadline
from cosmos_weightsync.errors import DeadlineError, TransferError, VersionError
from cosmos_weightsync.frames import ControlConnection, connect_control
from cosmos_weightsync.layout import Layout
from cosmos_weightsync.membership import Member, View

__all__ = ["Attendance"]

WAIT_S = 2.0
"""A change is told at once; this is how often a lease is renewed without any."""
RETRY_S = 0.2
_NUDGE_S = 1.0
_ANSWER_S = 30.0


class Attendance:
    """Registers a member and keeps it registered until closed.

    Args:
        directory: Its endpoint.
        member: What to register.
        token: What the directory wants to be shown.
    """

    def __init__(self, directory: str, member: Member, token: str) -> None:
        self._directory = directory
        self._token = token
        self._member = member
        self._layout: Layout | None = None
        self._layouts: dict[str, Layout] = {}
        self._view = View(0, -1, ())
        self._changed = threading.Condition()
        self._joining = threading.Lock()
        self._told: Member | None = None
        self._is_closed = False
        self._trouble = ""
        self._connection: ControlConnection | None = None
        self._thread = threading.Thread(target=self._run, name="weight-attendance", daemon=True)
        self._thread.start()

    @property
    def id(self) -> str:
        """This member's."""
        return self._member.id

    @property
    def view(self) -> View:
        """Everybody, as far as is known."""
        return self._view

    def describe(self, layout: Layout) -> None:
        """Say what this member holds of every version; told with the next `hold`."""
        with self._changed:
            self._layout = layout
            self._member = replace(self._member, layout=layout.digest())

    def hold(self, version: int, run_id: str, content: Content | None = None) -> None:
        """Say which version this member has whole, -1 for none, and what it came in.

        Told as soon as the directory is there.
        """
        with self._changed:
            self._member = replace(self._member, version=version, run_id=run_id, content=content)
        self._nudge()

    def wait_for(self, is_ready: Callable[[View], bool], deadline: Deadline) -> View:
        """Wait until the view is as it should be.

        Raises:
            DeadlineError: it is not, in time.
        """
        with self._changed:
            while not is_ready(self._view):
                self._changed.wait(deadline.remaining(self._whom()))
            return self._view

    def layout_of(self, member: Member, deadline: Deadline) -> Layout:
        """What a member holds.

        Raises:
            TransferError: the directory cannot be asked.
            VersionError: it does not know.
        """
        if member.layout not in self._layouts:
            answer = self._ask("layout", {"digest": member.layout}, "layout", deadline)
            self._layouts[member.layout] = Layout.from_json(answer["layout"])
        return self._layouts[member.layout]

    def vote(
        self, version: int, vote: Vote, quorum: Quorum, deadline: Deadline, *, run_id: str = ""
    ) -> Standing:
        """Say how it is with a version; returns how the group is, waiting a little for a decision.

        What is ready is told along, if this member holds that version.

        Args:
            version: Which.
            vote: How it is.
            quorum: Of the group.
            deadline: When to give up.
            run_id: Of the trainer that made it; if empty, that of the senders who are there.

        Raises:
            ConfigurationError: others of the group want another quorum.
            DeadlineError: the directory did not answer in time.
        """
        content = self._member.content if self._member.version == version else None
        while True:
            request = {
                "id": self._member.id,
                "version": version,
                "run": run_id,
                "vote": vote,
                "quorum": {"kind": quorum.kind, "count": quorum.count},
                "content": None if content is None else content.to_json(),
                "wait": min(WAIT_S, deadline.remaining(self._whom())),
            }
            try:
                return Standing.from_json(self._ask("vote", request, "voted", deadline))
            except (TransferError, VersionError):  # It restarts, or does not know us yet.
                with self._changed:
                    self._changed.wait(min(RETRY_S, deadline.remaining(self._whom())))

    def close(self, deadline: Deadline) -> None:
        """Leave. May be repeated.

        Raises:
            DeadlineError: a thread did not end in time.
        """
        with self._changed:
            was_closed, self._is_closed = self._is_closed, True
            self._changed.notify_all()
        if self._connection is not None:
            self._connection.close()
        self._thread.join(deadline.remaining("the attendance thread"))
        if self._thread.is_alive():
            raise DeadlineError("the attendance thread did not end in time")
        if not was_closed:
            try:
                self._ask("leave", {"id": self._member.id}, "view", deadline.within(1.0))
            except (TransferError, VersionError):
                return  # The lease ends by itself.

    def _whom(self) -> str:
        """The directory, and what it said if it does not want this member."""
        why = f", where the last try failed: {self._trouble}" if self._trouble else ""
        return f"the directory at {self._directory}{why}"

    def _nudge(self) -> None:
        """Make the change known now, if that is quickly done; else the thread does it."""
        with contextlib.suppress(TransferError, VersionError):
            self._join_over(self._ask, Deadline.after(_NUDGE_S))

    def _join_over(
        self,
        ask: Callable[[str, Mapping[str, Any], str, Deadline], Mapping[str, Any]],
        deadline: Deadline,
    ) -> None:
        """Say what this member is now; one thread at a time, so that the newest comes last."""
        if not self._joining.acquire(timeout=deadline.remaining("the directory")):
            raise DeadlineError("the attendance thread is telling the directory")
        try:
            with self._changed:
                member, layout = self._member, self._layout
            content = {
                "member": member.to_json(),
                "layout": None if layout is None else layout.to_json(),
            }
            self._see(ask("join", content, "view", deadline))
            self._told = member
        finally:
            self._joining.release()

    def _ask(
        self, kind: str, content: Mapping[str, Any], expect: str, deadline: Deadline
    ) -> Mapping[str, Any]:
        connection = connect_control(self._directory, deadline)
        connection.peer = f"directory at {self._directory}"
        try:
            connection.send("hello", {"token": self._token}, deadline)
            connection.send(kind, content, deadline)
            return connection.receive(deadline, expect=expect)
        finally:
            connection.close()

    def _see(self, frame: Mapping[str, Any]) -> None:
        view = View.from_json(frame)
        with self._changed:
            self._view, self._trouble = view, ""
            self._changed.notify_all()

    def _run(self) -> None:
        while not self._is_closed:
            try:
                self._attend()
            except (TransferError, VersionError) as error:
                with self._changed:
                    self._trouble = str(error)
                    if not self._is_closed:
                        self._changed.wait(RETRY_S)

    def _attend(self) -> None:
        """Register and follow the view, until anything goes wrong."""
        deadline = Deadline.after(_ANSWER_S)
        self._connection = connection = connect_control(self._directory, deadline)
        connection.peer = f"directory at {self._directory}"

        def ask(
            kind: str, content: Mapping[str, Any], expect: str, deadline: Deadline
        ) -> Mapping[str, Any]:
            connection.send(kind, content, deadline)
            return connection.receive(deadline, expect=expect)

        try:
            connection.send("hello", {"token": self._token}, deadline)
            self._join_over(ask, deadline)
            while not self._is_closed:
                if self._told is not self._member:  # A nudge came to nothing.
                    self._join_over(ask, Deadline.after(_ANSWER_S))
                content = {"id": self.id, "revision": self._view.revision, "wait": WAIT_S}
                self._see(ask("sync", content, "view", Deadline.after(WAIT_S + _ANSWER_S)))
        finally:
            connection.close()
