"""Who takes part in the next step: torchft's Lighthouse, and a store that outlives the replicas.

A replica asks the Lighthouse for a quorum before each step. The answer is the same list for all
who are alive: as soon as everybody of the last quorum has asked, or when the leases of those who
did not have run out. A newcomer is in the next list.

host:     MeetingPlace ── Lighthouse (who is alive) + store (rendezvous, decisions, beats)
replica:  Meeting.attend(step) ──► Attendance: the members, each with the step it is at
"""

import threading
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any, Protocol

from torch._C._distributed_c10d import Store, TCPStore

from cosmos_core.addresses import in_url
from cosmos_parallel.errors import ParallelError, ReplicaLostError
from cosmos_parallel.process import open_store

_BEATS_PER_LEASE = 5
_MS = 1000


@dataclass(frozen=True, kw_only=True, slots=True)
class Attendee:
    """A replica that takes part.

    Attributes:
        name: of the replica; a process that comes back after a death has another one.
        step: the step it would take; -1 if it has no state that can be used.
        taken_in: epoch in which it took the step before; -1 if it loaded what it has.
        line: of its weights (`cosmos_core.lineage`).
        num_lost: how many steps and connections it has lost.
        wants_stop: whether it was asked to end.
    """

    name: str
    step: int
    taken_in: int = -1
    line: tuple[int, ...] = ()
    num_lost: int = 0
    wants_stop: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Attendance:
    """The members of one epoch, the same on all of them.

    Attributes:
        epoch: grows when the members change, or when one of them has lost a step.
        attendees: in the same order everywhere.
    """

    epoch: int
    attendees: tuple[Attendee, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the members."""
        return tuple(attendee.name for attendee in self.attendees)

    @property
    def line(self) -> tuple[int, ...]:
        """The newest line of a member."""
        return max((attendee.line for attendee in self.attendees), key=len)


class Membership(Protocol):
    """What elastic replicas need to know of each other."""

    @property
    def name(self) -> str:
        """Name of this replica, of which there is only one at any time."""
        ...

    def attend(self, me: Attendee) -> Attendance:
        """Return who takes part in the next epoch; blocks until that is settled.

        Raises:
            ReplicaLostError: if it was not settled in time.
        """
        ...

    def is_alive(self, name: str) -> bool:
        """Whether a member has shown a sign of life since this was asked last."""
        ...

    def close(self) -> None:
        """Leave; may be called twice."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class ElasticConfig:
    """How long elastic replicas wait for each other.

    Attributes:
        lease_s: a replica without a sign of life for this long is left out of the next step.
        join_s: how long a step waits for a replica that is alive and has not asked to take part.
        timeout_s: longest wait for a replica that is alive but does not get there. Who joins during
            a step waits for its end, however long it is, and says so as often.
        min_replicas: no step is taken by fewer.
    """

    lease_s: float = 5.0
    join_s: float = 300.0
    timeout_s: float = 600.0
    min_replicas: int = 1

    def __post_init__(self) -> None:
        """Check the numbers.

        Raises:
            ValueError: naming the one that is out of range.
        """
        for name in ("lease_s", "join_s", "timeout_s", "min_replicas"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be above 0")
        if self.timeout_s < self.lease_s:
            raise ValueError(
                f"timeout_s is {self.timeout_s} and lease_s {self.lease_s}; a replica that is "
                "alive must be waited for at least as long as one that is not"
            )


class MeetingPlace:
    """Where replicas find each other; hosted by a process that is none of them.

    Attributes:
        address: what replicas are told.
    """

    def __init__(self, config: ElasticConfig, *, host: str = "127.0.0.1") -> None:
        """Start the Lighthouse and the store on free ports of this host.

        Args:
            config: how long to wait for whom.
            host: name or address at which replicas reach this host.

        Raises:
            ParallelError: if torchft is not installed, or no port can be had.
        """
        self._lighthouse = _coordination().LighthouseServer(
            bind=f"{in_url(host)}:0",
            min_replicas=config.min_replicas,
            join_timeout_ms=int(config.join_s * _MS),
            quorum_tick_ms=max(1, int(config.lease_s * _MS / 50)),
            heartbeat_timeout_ms=int(config.lease_s * _MS),
        )
        self._store = open_store(host, 0, hosting=True)
        lighthouse_port = self._lighthouse.address().rpartition(":")[2]
        self.address = f"{host}:{self._store.port}:{lighthouse_port}"

    def close(self) -> None:
        """Stop the Lighthouse; nobody can meet from then on."""
        self._lighthouse.shutdown()


class Meeting:
    """This replica's seat at a meeting place; opened by its rank 0 only."""

    def __init__(self, address: str, name: str, config: ElasticConfig) -> None:
        """Begin to show signs of life.

        Args:
            address: of the meeting place.
            name: of this process: unlike that of any other, also of one that died.
            config: as the meeting place has it.

        Raises:
            ParallelError: if torchft is not installed or the place cannot be reached.
        """
        self._name = name
        self._config = config
        self._seen: dict[str, bytes] = {}
        self._store = open_meeting_store(address, config)
        host, _, lighthouse_port = address.rsplit(":", 2)
        self._url = f"http://{in_url(host)}:{lighthouse_port}"
        self._client = self._connect()
        self._left = threading.Event()
        beats = open_meeting_store(address, config)
        self._thread = threading.Thread(
            target=self._beat, args=(self._connect(), beats), name="beats", daemon=True
        )
        self._thread.start()

    @property
    def name(self) -> str:
        """Name of this replica."""
        return self._name

    def attend(self, me: Attendee) -> Attendance:
        """Return who takes part in the next epoch; see ``Membership``."""
        try:
            quorum = self._client.quorum(
                replica_id=self._name,
                timeout=timedelta(seconds=self._config.timeout_s),
                address="",
                store_address="",
                step=max(me.step, 0),
                world_size=1,
                shrink_only=False,
                data=asdict(me),
            )
        except (RuntimeError, TimeoutError) as error:
            raise ReplicaLostError(
                f"{self._name} waited {self._config.timeout_s:g} s for a quorum of at least "
                f"{self._config.min_replicas} replicas: {error}"
            ) from error
        attendees = tuple(_attendee(member) for member in quorum.participants)
        num_lost = sum(attendee.num_lost for attendee in attendees)
        # the Lighthouse counts changes of members only; a lost connection needs a new epoch too
        return Attendance(epoch=(int(quorum.quorum_id) << 32) + num_lost, attendees=attendees)

    def is_alive(self, name: str) -> bool:
        """Whether a member has shown a sign of life since this was asked last."""
        key = _beat_key(name)
        beat = self._store.get(key) if self._store.check([key]) else b""
        changed = self._seen.get(name) != beat
        self._seen[name] = beat
        return changed

    def close(self) -> None:
        """Leave; may be called twice."""
        self._left.set()
        self._thread.join()

    def _connect(self) -> Any:
        # Any: the stubs of torchft's Rust module are not complete
        timeout = timedelta(seconds=self._config.timeout_s)
        return _coordination().LighthouseClient(self._url, connect_timeout=timeout)

    def _beat(self, client: Any, store: Store) -> None:
        count = 0
        while not self._left.wait(self._config.lease_s / _BEATS_PER_LEASE):
            count += 1
            try:
                client.heartbeat(self._name)
                store.set(_beat_key(self._name), str(count))
            except (RuntimeError, TimeoutError, ValueError):
                continue  # the one who works will notice that nobody can be reached


def open_meeting_store(address: str, config: ElasticConfig) -> TCPStore:
    """Open the store of a meeting place; every rank needs one of its own.

    Raises:
        ParallelError: if it cannot be reached.
    """
    host, port, _ = address.rsplit(":", 2)
    return open_store(host, int(port), hosting=False, timeout_s=config.timeout_s)


def _attendee(member: Any) -> Attendee:
    said = member.data or {}
    return Attendee(
        name=member.replica_id,
        step=int(said["step"]),
        taken_in=int(said["taken_in"]),
        line=tuple(said["line"]),
        num_lost=int(said["num_lost"]),
        wants_stop=bool(said["wants_stop"]),
    )


def _beat_key(name: str) -> str:
    return f"beats/{name}"


def _coordination() -> Any:
    # Any: see Meeting._connect
    try:
        from torchft import coordination
    except ImportError as error:
        raise ParallelError(
            "replicas that come and go need torchft: pip install 'cosmos-parallel[elastic]'"
        ) from error
    return coordination
