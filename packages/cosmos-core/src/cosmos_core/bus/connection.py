"""A process's connection to Redis; its calls have deadlines and survive a server that restarts."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec
from redis import asyncio as redis_asyncio
from redis import exceptions

from cosmos_core.bus.cancelled import cancellable
from cosmos_core.bus.channel import ReplicaChannel
from cosmos_core.bus.code_version import code_version
from cosmos_core.bus.errors import (
    BusError,
    BusPasswordError,
    BusRefusedError,
    BusUnreachableError,
    PayloadMissingError,
    RunLostError,
    ServerSettingsError,
)
from cosmos_core.bus.keys import Keys
from cosmos_core.bus.passwords import mask_password, what_is_wrong
from cosmos_core.bus.patience import DISK_FULL, Outage, Patience, advice_on
from cosmos_core.bus.server_settings import problems_of, server_facts, warnings_of
from cosmos_core.bus.streams import Entry, stream_entries
from cosmos_core.bus.tls import absent_files, tls_advice
from cosmos_core.messages import (
    Event,
    ReplicaJoined,
    decode_event,
    encode_message,
)
from cosmos_core.metrics import MetricRecord

Answer = TypeVar("Answer")

_BLOCK_MS = 1000
KEPT_S = 7 * 24 * 3600
"""For so long after the last sign of life of whoever controls it, a server keeps a run."""
METRICS_KEPT = 100_000  # measurements, if nobody fetches them
_METRICS_AT_ONCE = 256
_SINKS = "sinks"
_UNACKNOWLEDGED = "0"
_GONE_S = 60.0
_FULL_S = 12 * 3600.0
_FORGET_S = 5.0
_GONE = (exceptions.ConnectionError, exceptions.TimeoutError, OSError)
_REFUSED = (
    exceptions.AuthenticationError,
    exceptions.AuthorizationError,
    exceptions.NoPermissionError,
)
_METRIC = msgspec.msgpack.Decoder(MetricRecord)


def _say_nothing(_: str, /) -> None:
    """Tell nobody."""


class Bus:
    """One process's access to a run: events up, payloads, metrics, and status.

    Use it from one event loop. Calls that find Redis gone try again, ever more slowly, until
    ``patience_s`` is over; time in which this process was suspended does not count.

    Example:
        >>> async with await Bus.connect(url, "run-1") as bus:
        ...     async with bus.join(joined) as channel:
        ...         async for command in channel.commands():
        ...             ...

    Attributes:
        keys: names of the run's keys.
        address: the URL without its password, for people.
    """

    def __init__(
        self,
        client: "redis_asyncio.Redis",
        url: str,
        namespace: str,
        patience_s: float | None,
        say: Callable[[str], None],
    ) -> None:
        """Wrap a client that answered; `connect` is the way to get one."""
        self.keys = Keys(namespace)
        self.address = mask_password(url)
        self._client = client
        self._patience_s = patience_s
        self._say = say
        self._outage = Outage(self.address, say)

    @classmethod
    async def connect(
        cls,
        url: str,
        namespace: str,
        *,
        connect_s: float = 10.0,
        patience_s: float | None = None,
        say: Callable[[str], None] = _say_nothing,
    ) -> "Bus":
        """Reach a server and return the bus of one run on it.

        Args:
            url: ``redis://[:password@]host:port/db``, ``rediss://`` for TLS, ``unix://path``. TLS
                takes ``?ssl_ca_certs=FILE`` for a server whose certificate is of one's own
                authority, ``ssl_certfile`` and ``ssl_keyfile`` for one that wants ours.
            namespace: the run; runs of other namespaces on the server are never touched.
            connect_s: how long the server may take to answer at first.
            patience_s: how long every later call tries to reach it, and waits for its disk; a
                minute, and half a day for the disk, unless told.
            say: told what is waited for: a server that does not answer, a controller that is gone.

        Raises:
            BusPasswordError: if it refuses the password, or wants one.
            BusUnreachableError: if it does not answer, or the URL is none.
            BusRefusedError: if it has no such database.
        """
        try:
            client = redis_asyncio.Redis.from_url(
                url,
                socket_connect_timeout=5.0,
                socket_timeout=_BLOCK_MS / 1000 + 10.0,
                retry=None,
                health_check_interval=0,
            )
            client.connection_pool.make_connection()  # which knows all that the URL may say
        except (ValueError, TypeError) as error:
            reason = what_is_wrong(url, error)
            raise BusUnreachableError(
                f"{mask_password(url)!r} is not the URL of a Redis server: {reason}"
            ) from error
        if absent := absent_files(url):
            raise BusUnreachableError(f"{mask_password(url)}: {absent}")
        bus = cls(client, url, namespace, patience_s, say)
        try:
            # not a ping, which a server whose disk is full refuses like a write
            await bus.call(lambda c: c.echo(b""), patience_s=connect_s)
        except BusError as error:
            await client.aclose()
            is_gone = isinstance(error.__cause__, _GONE)
            if is_gone and not isinstance(error.__cause__, _REFUSED):
                advice = await asyncio.to_thread(tls_advice, url, str(error))
                raise BusUnreachableError(f"{error}{advice}") from error
            raise
        return bus

    async def __aenter__(self) -> "Bus":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections; may be called twice."""
        await self._client.aclose()

    async def call(
        self, request: Callable[[Any], Awaitable[Answer]], *, patience_s: float | None = None
    ) -> Answer:
        """Send a request to Redis; send it again if the server went away meanwhile.

        A request may therefore be carried out twice: send only what may be.

        Raises:
            BusUnreachableError: if the server stays away for ``patience_s``.
            BusRefusedError: if it does not do it, for so long where that may pass.
        """
        patience_s = self._patience_s if patience_s is None else patience_s
        patience = Patience(_GONE_S if patience_s is None else patience_s)
        while True:
            try:
                answer = await cancellable(request(self._client))
                self._outage.end()
                return answer
            except _REFUSED as error:
                raise BusPasswordError(
                    f"Redis at {self.address} refuses us: {error}; "
                    "give the password in the URL, redis://:PASSWORD@HOST:PORT"
                ) from error
            except _GONE as error:
                if patience.is_over():
                    raise BusUnreachableError(
                        f"no Redis answers at {self.address} ({error}), tried for "
                        f"{patience.longest_s:g} s: is it running, and is the address right?"
                    ) from error
                self._outage.note(error, patience)
            except exceptions.ResponseError as error:
                advice = advice_on(error)
                said = f"Redis at {self.address} refuses what it is asked: {error}{advice}"
                is_full = patience_s is None and DISK_FULL in said
                if not advice or patience.is_over(_FULL_S if is_full else 0.0):
                    raise BusRefusedError(said) from error
            await patience.pause()

    async def check_server(self) -> list[str]:
        """Return what somebody should know of the server before a run begins on it.

        A server that does not tell its settings is taken as it is.

        Raises:
            ServerSettingsError: if it would lose the run, or fail it late, with what mends that.
            BusUnreachableError: if it does not answer.
        """
        facts = await self.call(server_facts)
        if problems := problems_of(facts):
            raise ServerSettingsError(
                f"no run can begin with Redis at {self.address}: {'; '.join(problems)}"
            )
        return [f"Redis at {self.address}: {warning}" for warning in warnings_of(facts)]

    async def refusal(self) -> str:
        """Return why the server takes no writes now, and what to do; empty while it does.

        Raises:
            BusUnreachableError: if it does not answer.
        """
        try:
            await self.call(lambda c: c.hdel(self.keys.payloads, b""), patience_s=0.0)
        except BusRefusedError as error:
            return str(error)
        return ""

    # ------------------------------------------------------------------ replicas

    def join(self, joined: ReplicaJoined) -> ReplicaChannel:
        """Return the channel of a replica; entering it tells the controller."""
        return ReplicaChannel(self.call, self.keys, joined, self._say)

    async def send_event(self, event: Event) -> None:
        """Report something that is not a replica's own word, such as its death."""
        code = code_version().encode()
        fields = {b"r": b"", b"i": b"", b"v": code, b"m": encode_message(event)}
        await self.call(lambda c: c.xadd(self.keys.events, fields))

    async def unheard(self) -> list[Event]:
        """Return what has been said since a controller last listened, in order."""
        entries = await self.call(lambda c: c.xrange(self.keys.events))
        ours = code_version().encode()
        return [decode_event(f[b"m"]) for _, f in entries if f.get(b"v") == ours]

    # ------------------------------------------------------------------ payloads

    async def put_payloads(self, payloads: Mapping[str, bytes]) -> None:
        """Store payloads, durable when this returns; they are deleted when consumed.

        Until then they are there for as long as what a controller has committed of the run.
        """
        if not payloads:
            return

        async def put(client: Any) -> None:
            async with client.pipeline(transaction=False) as pipe:
                for key, data in payloads.items():
                    pipe.hset(self.keys.payloads, key, data)
                pipe.expire(self.keys.payloads, KEPT_S)
                await pipe.execute()

        await self.call(put)

    async def get_payloads(self, keys: Sequence[str]) -> list[bytes]:
        """Fetch payloads, in the order of their keys.

        Raises:
            PayloadMissingError: naming those that are not there.
        """
        if not keys:
            return []
        found = await self.call(lambda c: c.hmget(self.keys.payloads, keys))
        missing = [key for key, data in zip(keys, found, strict=True) if data is None]
        if missing:
            raise PayloadMissingError(
                f"{len(missing)} of {len(keys)} payloads are not in the store, first of them "
                f"{missing[0]!r}: they were never stored, or their group is done"
            )
        return found

    async def delete_payloads(self, keys: Sequence[str]) -> None:
        """Delete payloads; those that are not there do not matter."""
        if keys:
            await self.call(lambda c: c.hdel(self.keys.payloads, *keys))

    async def forget_payloads(self, namespace: str = "") -> None:
        """Delete all payloads of a run that is over: this one, or that of another namespace."""
        keys = Keys(namespace) if namespace else self.keys
        await self.call(lambda c: c.unlink(keys.payloads), patience_s=_FORGET_S)

    async def payload_keys(self) -> list[str]:
        """Return the keys of all payloads that are stored."""
        found = await self.call(lambda c: c.hkeys(self.keys.payloads))
        return [key.decode() for key in found]

    # ------------------------------------------------------------------ metrics and status

    async def send_metrics(self, records: Sequence[MetricRecord]) -> None:
        """Hand measurements on to whoever runs the sinks."""

        async def send(client: Any) -> None:
            async with client.pipeline(transaction=False) as pipe:
                for record in records:
                    fields = {b"m": msgspec.msgpack.encode(record)}
                    pipe.xadd(self.keys.metrics, fields, maxlen=METRICS_KEPT, approximate=True)
                pipe.expire(self.keys.metrics, KEPT_S)
                await pipe.execute()

        if records:
            await self.call(send)

    async def metrics(self) -> AsyncIterator[MetricRecord]:
        """Yield measurements as they come, for ever; each to one reader of all.

        A record is acknowledged when the next ones are asked for, so a reader that dies leaves
        at most the batch it held to be read again.

        Raises:
            RunLostError: if Redis has forgotten what was read, as after a restart without a log.
        """
        await self.call(self._make_sinks_group)
        start = _UNACKNOWLEDGED  # what a reader before us left
        while True:
            entries, num_tries = await self._read_metrics(start)
            for _, fields in entries:
                if fields:  # of many that nobody fetched the oldest are gone, read or not
                    yield _METRIC.decode(fields[b"m"])
            if entries:
                await self._drop_metrics([entry for entry, _ in entries])
            if num_tries > 1:
                start = _UNACKNOWLEDGED  # an answer that got lost may have had some
            elif not entries:
                start = ">"

    async def num_metrics(self) -> int:
        """Return how many measurements nobody has dealt with yet."""
        return await self.call(lambda c: c.xlen(self.keys.metrics))

    async def _make_sinks_group(self, client: Any) -> None:
        try:
            await client.xgroup_create(self.keys.metrics, _SINKS, id="0", mkstream=True)
        except exceptions.ResponseError as error:
            if "BUSYGROUP" not in str(error):
                raise

    async def _read_metrics(self, start: str) -> tuple[list[Entry], int]:
        """Return the next entries, and how often they were asked for."""
        streams, num_tries = {self.keys.metrics: start}, 0

        async def read(client: Any) -> Any:
            nonlocal num_tries
            num_tries += 1
            return await client.xreadgroup(
                _SINKS, _SINKS, streams, count=_METRICS_AT_ONCE, block=_BLOCK_MS
            )

        try:
            return stream_entries(await self.call(read)), num_tries
        except BusRefusedError as error:
            if "NOGROUP" in str(error):
                raise RunLostError(self.address, self.keys.namespace) from error
            raise

    async def _drop_metrics(self, entries: Sequence[bytes]) -> None:
        async def drop(client: Any) -> None:
            async with client.pipeline(transaction=False) as pipe:
                pipe.xack(self.keys.metrics, _SINKS, *entries)
                pipe.xdel(self.keys.metrics, *entries)
                await pipe.execute()

        await self.call(drop)

    async def write_status(self, status: Mapping[str, Any]) -> None:
        """Leave what the controller says of itself for people to read."""
        data = msgspec.json.encode(status)
        await self.call(lambda c: c.set(self.keys.status, data, ex=KEPT_S))

    async def stand_by(self, name: str) -> None:
        """Say that a controller lives, which waits for the lease."""

        async def say(client: Any) -> None:
            async with client.pipeline(transaction=False) as pipe:
                pipe.hset(self.keys.standbys, name, str(time.time()))
                pipe.expire(self.keys.standbys, KEPT_S)
                await pipe.execute()

        await self.call(say)

    async def read_standbys(self) -> tuple[str, dict[str, float]]:
        """Return who has the controller's lease, and when each that has waited last said so."""
        holder = await self.call(lambda c: c.get(self.keys.lease))
        said = await self.call(lambda c: c.hgetall(self.keys.standbys))
        names = {name.decode(): float(said_s) for name, said_s in said.items()}
        return (holder or b"").decode(), names

    async def read_status(self) -> dict[str, Any]:
        """Return what the controller last said of itself; empty if it never did."""
        data = await self.call(lambda c: c.get(self.keys.status))
        return msgspec.json.decode(data) if data else {}
