"""A replica's two-way line to the controller: events up, commands down, and joining again."""

import contextlib
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Protocol

import msgspec

from cosmos_core.bus.absence import Absence
from cosmos_core.bus.code_version import code_version
from cosmos_core.bus.errors import BusError, CodeVersionError, SupersededError
from cosmos_core.bus.keys import Keys
from cosmos_core.bus.streams import Entry, entry_number, stream_entries
from cosmos_core.messages import (
    CancelGroup,
    Command,
    Event,
    Generate,
    GroupFailed,
    GroupFinished,
    GroupId,
    Progress,
    ReplicaJoined,
    ReplicaLeft,
    StepFinished,
    Stop,
    Train,
    VersionLoaded,
    VersionPublished,
    decode_command,
    encode_message,
)

_BLOCK_MS = 1000
_AT_ONCE = 64
_FAREWELL_S = 2.0
_GONE_S = 60.0
_LONGEST_S = 12 * 3600.0


class Call(Protocol):
    """What a channel needs of its connection: `Bus.call`."""

    async def __call__(
        self, request: Callable[[Any], Awaitable[Any]], *, patience_s: float | None = None
    ) -> Any:
        """Carry a request out, again if Redis went away meanwhile."""
        ...


class ReplicaChannel:
    """The line of one incarnation of a replica; made by `Bus.join`, used in ``async with``.

    Entering announces the replica; leaving says that it is gone. Commands of an older controller
    than the newest heard of are ignored. A replica that the controller took for dead is told so:
    the channel then cancels what the replica still holds (as ``CancelGroup``) and joins again. One
    that joins a run which has ended meanwhile is told to stop by the channel itself, as is one that
    the run ended without. One whose run has no controller for a minute says so, and waits on.

    Attributes:
        incarnation: tells this process apart from earlier ones of the same name.
    """

    def __init__(
        self,
        call: Call,
        keys: Keys,
        joined: ReplicaJoined,
        say: Callable[[str], None],
        *,
        gone_s: float = _GONE_S,
        longest_s: float = _LONGEST_S,
    ) -> None:
        """Nothing is sent before the channel is entered.

        Args:
            call: carries requests out.
            keys: of the run.
            joined: what is told of the replica.
            say: told when the run has had no controller for ``gone_s``, and when it has again.
            gone_s: seconds.
            longest_s: seconds without a controller after which it is waited for no longer.
        """
        self.incarnation = secrets.token_hex(8)
        self._call = call
        self._keys = keys
        self._joined = msgspec.structs.replace(joined, incarnation=self.incarnation)
        self._join_id = (0, 0)
        self._epoch = 0
        self._is_heard = False
        self._is_stopped = False
        self._absence = Absence(keys.namespace, say, gone_s, longest_s)
        self._held: dict[GroupId, int] = {}

    @property
    def replica(self) -> str:
        """Name of the replica."""
        return self._joined.replica

    async def __aenter__(self) -> "ReplicaChannel":
        self._join_id = await self._append(self._joined)
        return self

    async def __aexit__(self, _: object, error: BaseException | None, *__: object) -> None:
        if isinstance(error, SupersededError | CodeVersionError):
            return  # the controller knows, and would not listen
        reason = "stopped" if error is None else f"{type(error).__name__}: {error}"
        with contextlib.suppress(BusError):
            await self._append(
                ReplicaLeft(replica=self.replica, reason=reason), patience_s=_FAREWELL_S
            )

    async def send(self, event: Event) -> None:
        """Report an event, durable when this returns.

        Progress is only told to a controller that is there: one that comes later would have to read
        all that replicas had said meanwhile, and Redis to keep it.

        Raises:
            BusUnreachableError: if Redis stays away for longer than the patience of the bus.
        """
        match event:
            case GroupFinished() | GroupFailed():
                if self._held.get(event.group) == event.attempt:
                    del self._held[event.group]
            case VersionLoaded():
                self._joined = msgspec.structs.replace(self._joined, version=event.version)
            case StepFinished():
                joined = self._joined
                served = joined.version if joined.published is None else joined.published
                self._joined = msgspec.structs.replace(
                    joined, version=event.step + 1, lineage=event.lineage, published=served
                )
            case VersionPublished():
                self._joined = msgspec.structs.replace(self._joined, published=event.version)
            case Progress() if not await self._call(lambda c: c.exists(self._keys.lease)):
                return
            case _:
                pass
        await self._append(event)

    async def commands(self) -> AsyncIterator[Command]:
        """Yield commands in the order they were given, for ever.

        A run that ended before it heard of this replica gives it no command: it is told to stop,
        with the run's reason and an empty cut.

        Raises:
            SupersededError: if another process has joined under this name.
            CodeVersionError: if the controller runs other code than this process.
            ControllerGoneError: if the run has had no controller for half a day.
            BusUnreachableError: if Redis stays away for longer than the patience of the bus.
        """
        last = b"0-0"
        while True:
            entries = await self._read(last)
            if entries:
                self._absence.end()
            for entry, fields in entries:
                last = entry
                for command in await self._open(fields):
                    yield command
            if entries:
                self._is_heard = True
                await self._forget(last)
            elif reason := await self._end_without_us(last):
                self._is_heard = self._is_stopped = True
                yield Stop(reason=reason)

    async def _end_without_us(self, last: bytes) -> str:
        """Return why the run has ended, if it has unknown to this replica; no command has come.

        If there is nobody who could have given one, that is said.
        """
        is_absent = await self._is_absent()
        if self._is_stopped or (self._is_heard and not is_absent):
            return ""
        reason = await self._reason_of_end(last)
        if is_absent and not reason:
            self._absence.tell()
        return reason

    async def _is_absent(self) -> bool:
        if not self._absence.wait(_BLOCK_MS / 1000):
            return False
        holder = await self._call(lambda c: c.get(self._keys.lease))
        return self._absence.look((holder or b"").decode())

    async def _read(self, last: bytes, *, block_ms: int | None = _BLOCK_MS) -> list[Entry]:
        stream = self._keys.commands(self.replica, self.incarnation)
        answer = await self._call(lambda c: c.xread({stream: last}, count=_AT_ONCE, block=block_ms))
        return stream_entries(answer)

    async def _reason_of_end(self, last: bytes) -> str:
        """Return why the run has ended, if it has and no command is on its way to this replica."""
        data = await self._call(lambda c: c.get(self._keys.status))
        status: dict[str, Any] = msgspec.json.decode(data) if data else {}
        if not status.get("finished") or await self._read(last, block_ms=None):
            return ""
        return status["finished"]

    async def _forget(self, last: bytes) -> None:
        stream = self._keys.commands(self.replica, self.incarnation)
        await self._call(lambda c: c.xtrim(stream, minid=last))

    async def _open(self, fields: dict[bytes, bytes]) -> list[Command]:
        epoch = int(fields[b"e"])
        if epoch < self._epoch:
            return []
        self._epoch = epoch
        if b"refused" in fields:
            raise CodeVersionError(fields[b"refused"].decode())
        if b"superseded" in fields:
            raise SupersededError(f"another process has joined as {self.replica}; this one stops")
        if b"rejoin" in fields:
            return await self._rejoin(fields[b"rejoin"])
        command = decode_command(fields[b"c"])
        match command:
            case Generate():
                self._held[command.group] = command.attempt
            case CancelGroup():
                self._held.pop(command.group, None)
            case Stop():
                self._is_stopped = True
            case Train() if command.step < self._joined.version and not self._is_of_newer(command):
                return []  # given again while we were taken for dead, but taken meanwhile
            case _:
                pass
        return [command]

    def _is_of_newer(self, train: Train) -> bool:
        """Whether an order is from after a fall-back: its numbers are others than ours."""
        return len(train.line) > self._joined.lineage

    async def _rejoin(self, cause: bytes) -> list[Command]:
        if entry_number(cause) < self._join_id:
            return []  # about an event from before we joined again
        cancelled = [
            CancelGroup(group=group, attempt=attempt) for group, attempt in self._held.items()
        ]
        self._held.clear()
        self._is_heard = self._is_stopped = False
        if self._joined.role == "rollout":  # what it is loading may be of a lost lineage
            self._joined = msgspec.structs.replace(self._joined, endpoints=())
        self._join_id = await self._append(self._joined)
        return list[Command](cancelled)

    async def _append(self, event: Event, *, patience_s: float | None = None) -> tuple[int, int]:
        fields = {
            b"r": self.replica.encode(),
            b"i": self.incarnation.encode(),
            b"v": code_version().encode(),
            b"m": encode_message(event),
        }
        entry = await self._call(lambda c: c.xadd(self._keys.events, fields), patience_s=patience_s)
        return entry_number(entry)
