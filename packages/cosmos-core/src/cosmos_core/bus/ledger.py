"""The controller's side of the bus: its lease, its log, and commits that happen whole or not.

A commit is one Lua script: it appends a batch of events to the log, the commands that followed
from them to the replicas' streams, and the figures of the steps they ended to the metrics; it moves
the cursor over the events, and deletes payloads nobody needs any more. Whatever dies before it
leaves events that are read again; after it, they are done.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from cosmos_core.bus.code_version import code_version
from cosmos_core.bus.connection import KEPT_S, METRICS_KEPT, Bus
from cosmos_core.bus.errors import BusError, FencedError, LeaseHeldError, RunLostError
from cosmos_core.bus.scripts import ACQUIRE, COMMIT, SWEEP
from cosmos_core.bus.streams import Entry, stream_entries
from cosmos_core.messages import Command, encode_message
from cosmos_core.metrics import MetricRecord

_LOG_PAGE = 1000
_SWEPT_AT_ONCE = 1000
_START = "0-0"


class Reported(msgspec.Struct, frozen=True, array_like=True):
    """An event as it came in: its place in the stream, who sent it, and its bytes.

    ``replica`` and ``incarnation`` are empty when it is not a replica's own word. ``code`` is the
    code version of who sent it: bytes of another one may mean something else, or nothing.
    """

    entry: str
    replica: str
    incarnation: str
    code: str
    data: bytes


class Logged(msgspec.Struct, frozen=True, array_like=True):
    """An event that was taken in, and the time it was given then."""

    now: float
    data: bytes


class Dispatch(msgspec.Struct, frozen=True, kw_only=True):
    """A command for one incarnation of a replica; without a command it is a ``notice``.

    Notices are ``rejoin``, with the event that showed the need of it, ``superseded``, and
    ``refused``, with the reason.
    """

    replica: str
    incarnation: str
    command: Command | None = None
    notice: str = ""
    about: str = ""


class Commit(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that becomes true at once.

    Attributes:
        cursor: last event read, whether it was taken in or not.
        events: events taken in, in order.
        dispatches: what follows from them, in order.
        garbage: payloads that nobody reads again.
        snapshot: state after these events, which replaces the log; empty for none.
        metrics: of the steps that these events committed.
    """

    cursor: str
    events: Sequence[Logged] = ()
    dispatches: Sequence[Dispatch] = ()
    garbage: Sequence[str] = ()
    snapshot: bytes = b""
    metrics: Sequence[MetricRecord] = ()


class _Batch(msgspec.Struct, frozen=True, array_like=True):
    cursor: str
    events: Sequence[Logged]


class _Snapshot(msgspec.Struct, frozen=True, array_like=True):
    cursor: str
    now: float
    state: bytes
    code: str = ""


class Past(msgspec.Struct, frozen=True, kw_only=True):
    """What earlier controllers of a run left: a state (or none) and the events since.

    ``code`` is that of the controller which wrote the state; empty for one before it was told.
    """

    state: bytes | None
    events: Sequence[Logged]
    now: float
    code: str = ""


class Ledger:
    """The active controller's hold on a run; made by `acquire`, refused to all others.

    Attributes:
        token: fencing token, the epoch of the commands committed.
    """

    def __init__(self, bus: Bus, owner: str, lease_s: float, token: int) -> None:
        """Wrap a lease that was granted; `acquire` is the way to get one."""
        self.token = token
        self._bus = bus
        self._owner = owner
        self._lease_ms = int(lease_s * 1000)
        self._sequence = 0
        self._cursor = _START
        self._log_length = 0

    @classmethod
    async def acquire(cls, bus: Bus, *, owner: str, lease_s: float) -> "Ledger":
        """Become the controller of the run.

        Args:
            bus: the run.
            owner: a name; a process with the name of the last holder need not wait for its lease.
            lease_s: after so long without a commit, any other may take over.

        Raises:
            LeaseHeldError: if another owner's lease has not run out.
        """
        keys = [bus.keys.lease, bus.keys.token]
        token, holder = await bus.call(
            lambda c: c.eval(ACQUIRE, len(keys), *keys, owner, int(lease_s * 1000))
        )
        if not token:
            raise LeaseHeldError(
                f"{holder.decode()!r} controls the run {bus.keys.namespace!r}; it is free "
                f"{lease_s:g} s after that one's last sign of life"
            )
        return cls(bus, owner, lease_s, int(token))

    @property
    def log_length(self) -> int:
        """Commits since the last snapshot."""
        return self._log_length

    async def recall(self) -> Past:
        """Read what earlier controllers committed; call it once, before anything else.

        Raises:
            BusError: if the log or the snapshot cannot be read.
        """
        keys = self._bus.keys
        sequence, data = await self._bus.call(lambda c: c.mget([keys.sequence, keys.snapshot]))
        self._sequence = int(sequence or 0)
        snapshot = _decode(data, _Snapshot) if data else _Snapshot(_START, 0.0, b"")
        events, self._cursor = list[Logged](), snapshot.cursor
        for batch in await self._log():
            events.extend(batch.events)
            self._cursor = batch.cursor
            self._log_length += 1
        now = events[-1].now if events else snapshot.now
        state = snapshot.state if data else None
        return Past(state=state, events=events, now=now, code=snapshot.code)

    async def read(self, *, wait_s: float, limit: int = 1000) -> list[Reported]:
        """Return events after the last commit, waiting a while for the first one."""
        streams = {self._bus.keys.events: self._cursor}
        answer = await self._bus.call(
            lambda c: c.xread(streams, count=limit, block=max(1, int(wait_s * 1000)))
        )
        return [_reported(entry, fields) for entry, fields in stream_entries(answer)]

    async def commit(self, commit: Commit) -> None:
        """Make a commit true, and renew the lease.

        Raises:
            FencedError: if another controller has taken over; nothing of the commit is true.
            RunLostError: if earlier commits are gone, as after a restart without a persistent log.
        """
        keys = self._bus.keys
        names = [keys.token, keys.lease, keys.sequence, keys.events, keys.log, keys.snapshot]
        names += [keys.metrics, keys.payloads]
        cursor = commit.cursor or self._cursor
        entry = b""
        if commit.events or cursor != self._cursor:
            entry = msgspec.msgpack.encode(_Batch(cursor, commit.events))
        arguments: list[Any] = [self.token, self._owner, self._lease_ms, self._sequence + 1]
        arguments += [cursor, entry, self._snapshot_of(commit, cursor), KEPT_S * 1000]
        arguments += [METRICS_KEPT, len(commit.metrics), len(commit.garbage)]
        arguments += map(msgspec.msgpack.encode, commit.metrics)
        arguments += commit.garbage
        arguments += self._arguments_of(commit.dispatches)
        answer = await self._bus.call(lambda c: c.eval(COMMIT, len(names), *names, *arguments))
        if answer == b"fenced":
            raise FencedError(
                f"another controller has taken over the run {keys.namespace!r} from "
                f"{self._owner!r} (token {self.token}); this one stops"
            )
        if answer == b"lost":
            raise RunLostError(self._bus.address, keys.namespace)
        self._sequence += 1
        self._cursor = cursor
        self._log_length = 0 if commit.snapshot else self._log_length + bool(entry)

    async def sweep(self, is_over: Callable[[str], bool]) -> None:
        """Delete payloads that nobody told a controller of before it was too late.

        Args:
            is_over: whether a payload's key is of an attempt that nobody waits for, by all that
                was committed.
        """
        keys = self._bus.keys
        over = [key for key in await self._bus.payload_keys() if is_over(key)]
        for at in range(0, len(over), _SWEPT_AT_ONCE):
            words = [self.token, *over[at : at + _SWEPT_AT_ONCE]]
            await self._bus.call(lambda c, w=words: c.eval(SWEEP, 2, keys.token, keys.payloads, *w))

    async def release(self) -> None:
        """Let the next controller in at once; harmless if the lease is lost already."""
        script = "if redis.call('GET', KEYS[1]) == ARGV[1] then redis.call('DEL', KEYS[2]) end"
        keys = self._bus.keys
        await self._bus.call(lambda c: c.eval(script, 2, keys.token, keys.lease, self.token))

    def _snapshot_of(self, commit: Commit, cursor: str) -> bytes:
        if not commit.snapshot:
            return b""
        now = commit.events[-1].now if commit.events else 0.0
        return msgspec.msgpack.encode(_Snapshot(cursor, now, commit.snapshot, code_version()))

    def _arguments_of(self, dispatches: Sequence[Dispatch]) -> list[Any]:
        arguments: list[Any] = []
        for dispatch in dispatches:
            stream = self._bus.keys.commands(dispatch.replica, dispatch.incarnation)
            if dispatch.command is None:
                arguments += [stream, dispatch.notice, dispatch.about]
            else:
                arguments += [stream, "c", encode_message(dispatch.command)]
        return arguments

    async def _log(self) -> list[_Batch]:
        batches, start = list[_Batch](), "-"
        while True:
            page = await self._log_page(start)
            batches.extend(_decode(fields[b"b"], _Batch) for _, fields in page)
            if len(page) < _LOG_PAGE:
                return batches
            start = "(" + page[-1][0].decode()

    async def _log_page(self, start: str) -> list[Entry]:
        log = self._bus.keys.log
        return await self._bus.call(lambda c: c.xrange(log, min=start, count=_LOG_PAGE))


def _reported(entry: bytes, fields: Mapping[bytes, bytes]) -> Reported:
    return Reported(
        entry=entry.decode(),
        replica=fields[b"r"].decode(),
        incarnation=fields[b"i"].decode(),
        code=fields.get(b"v", b"").decode(),
        data=fields[b"m"],
    )


def _decode(data: bytes, kind: type[Any]) -> Any:
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except msgspec.DecodeError as error:
        raise BusError(
            f"the log of this run cannot be read ({error}): it is damaged, or another version "
            "of cosmos_core wrote it"
        ) from error
