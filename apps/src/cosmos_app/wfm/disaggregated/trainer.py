"""The side of a run that trains: it publishes weights, orders samples and waits for them.

Replicas connect to every rank, say that they are free, get an order, and bring a micro-batch. They
come and go: what a lost one had been told to draw is given to the next that is free. So is the work
of one that says nothing for a lease, as one does that is stopped or whose machine is gone; if the
run has started it, it is killed, and so begins anew.

Ranks that share samples (the axis ``cp``) need the same ones: the first of them orders and takes,
and hands what came to the others.
"""

import contextlib
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, Listener, answer_challenge, deliver_challenge
from pathlib import Path
from typing import cast

import click
import torch
from torch import Tensor

from cosmos_app.errors import RunError
from cosmos_app.roles.process import own_address
from cosmos_app.wfm.disaggregated.meeting import Place, remove_place, write_place
from cosmos_app.wfm.disaggregated.orders import OrderBook
from cosmos_app.wfm.disaggregated.pulse import StartedReplica, is_pulse, started_replica
from cosmos_app.wfm.disaggregated.sharing import SampleSharing
from cosmos_parallel import TrainingMesh
from cosmos_weightsync import SenderConfig, WeightSender, shards_of
from cosmos_wfm import (
    DiffusionRlConfig,
    Rollout,
    RolloutMessage,
    RolloutOrder,
    StepParts,
    WfmError,
    pack_order,
    parse_rollout,
)

_END_S = 10.0
_LOOKS_PER_LEASE = 4
_TOGETHER_S = 30.0
_HAS_ALL, _WAITS, _LOST = range(3)


class ReplicaLostError(RunError):
    """Raised when the samples of a step did not come: replicas cannot be kept, or are too slow."""


@dataclass(slots=True)
class _Ear:
    """What is known of a connection: how often nothing had come, and who is at its other end."""

    quiet: int = 0
    replica: StartedReplica | None = None


class ReplicaRollouts:
    """A ``RemoteRollouts`` of one rank.

    Nothing listens before the first version is published, which says from which step on samples are
    wanted.

    Attributes:
        on_open: called once replicas can connect.
        on_heard: told, from a thread, of each word of a replica that the run has started.
        on_hung: told, from a thread, of replicas that the run has started and that say nothing;
            more than once of each. ``None`` where nobody can end them.
    """

    def __init__(
        self,
        weights: Mapping[str, Tensor],
        parts: StepParts,
        *,
        recipe: DiffusionRlConfig,
        mesh: TrainingMesh,
        token: str,
    ) -> None:
        """Get ready.

        Args:
            weights: that replicas draw with.
            parts: how the samples of a step are divided.
            recipe: the run, with ``disaggregated``.
            mesh: of the ranks that train.
            token: that replicas have to show; the same for all ranks.
        """
        assert recipe.disaggregated is not None
        self._config = recipe.disaggregated
        self._deadline_s = recipe.samples_deadline_s
        self._num_steps = recipe.num_steps
        self._output = Path(recipe.output)
        self._rank = mesh.process.rank
        self._mesh = mesh
        self._sharing = SampleSharing(mesh)
        self._numbers = parts.of_rank(mesh.data_rank) if self._sharing.is_first else []
        host, num_ranks = own_address(), mesh.process.world_size
        self._sender = WeightSender(
            shards_of(weights.items()),
            rank=self._rank,
            num_ranks=num_ranks,
            config=SenderConfig(token=token, bind_host=host),
        )
        self._listener = Listener((host, 0), family="AF_INET6" if ":" in host else "AF_INET")
        self._accepting = threading.Thread(target=self._accept, daemon=True)
        self._looking = threading.Thread(target=self._look, daemon=True)
        self.on_open: Callable[[], None] = lambda: None
        self.on_heard: Callable[[StartedReplica], None] = lambda _: None
        self.on_hung: Callable[[StartedReplica], None] | None = None
        _, port, *_ = cast("tuple[str, int]", self._listener.address)
        self._place = Place(
            host=host, port=port, weights=self._sender.endpoint, token=token, num_ranks=num_ranks
        )
        self._arrived: queue.SimpleQueue[RolloutMessage | Exception] = queue.SimpleQueue()
        self._kept: dict[tuple[int, int], Rollout] = {}
        self._ordered: range | None = None  # steps
        self._lock = threading.Lock()  # of what follows
        self._book: OrderBook[Connection] = OrderBook()
        self._ears: dict[Connection, _Ear] = {}
        self._closed = threading.Event()

    def publish(self, version: int) -> None:
        """Let replicas fetch the weights as they are now; the first time, let them connect."""
        self._sender.publish(version)
        is_first = self._ordered is None
        before = self._ordered or range(version, version)
        end = min(version + self._config.max_lag + 1, self._num_steps)
        self._ordered = range(before.start, max(end, before.stop))
        with self._lock:
            for step in range(before.stop, self._ordered.stop):
                least = max(before.start, step - self._config.max_lag)
                self._book.order(self._orders(step, least))
            self._hand_out()
        if is_first:
            self._accepting.start()
            self._looking.start()
            write_place(self._output, self._rank, self._place)
            self.on_open()

    def take(self, step: int) -> list[Rollout]:
        """Return this rank's micro-batches of a step.

        Ranks look at each other while they wait: a collective has a time limit.

        Raises:
            ReplicaLostError: if one of them did not come, on every rank.
        """
        end = time.monotonic() + self._deadline_s
        wanted = [(step, place) for place in range(len(self._numbers))]
        while True:
            lost: ReplicaLostError | None = None
            missing = 0
            try:
                missing = self._wait_for(wanted, end)
            except ReplicaLostError as error:
                lost = error
            state = _LOST if lost else _WAITS if missing else _HAS_ALL
            worst = int(self._mesh.max_(torch.tensor(state, device=self._mesh.process.device)))
            if worst == _LOST:
                raise lost or ReplicaLostError(
                    f"rank {self._rank}: samples of step {step} are missing on another rank; see "
                    "there"
                )
            if worst == _HAS_ALL:
                return self._sharing.share([self._kept.pop(key) for key in wanted])

    def _wait_for(self, wanted: Sequence[tuple[int, int]], end: float) -> int:
        """Wait for micro-batches a while; return how many are still missing.

        Raises:
            ReplicaLostError: if they cannot come any more, or the time is over.
        """
        until = min(end, time.monotonic() + _TOGETHER_S)
        while missing := [key for key in wanted if key not in self._kept]:
            step, place = missing[0]
            lack = f"rank {self._rank}: micro-batch {place} of step {step}"
            try:
                came = self._arrived.get(timeout=max(0.0, until - time.monotonic()))
            except queue.Empty:
                if time.monotonic() < end:
                    return len(missing)
                with self._lock:
                    num, num_silent = len(self._ears), len(self._silent())
                raise ReplicaLostError(
                    f"{lack} did not come in {self._deadline_s:g} s; {num} "
                    f"replicas are connected, {num_silent} of them say nothing"
                ) from None
            if isinstance(came, Exception):
                raise ReplicaLostError(f"{lack} is missing: {came}") from came
            self._kept[came.step, came.place] = came.rollout
        return 0

    def give_up(self, error: Exception) -> None:
        """Have ``take`` raise, as replicas cannot be had any more; from any thread."""
        self._arrived.put(error)

    def close(self) -> None:
        """Let replicas go; may be called twice."""
        remove_place(self._output, self._rank)
        self._closed.set()
        if self._accepting.is_alive():
            with contextlib.suppress(OSError):  # a last one, so that it looks up
                here = (self._place.host, self._place.port)
                socket.create_connection(here, timeout=_END_S).close()
            self._accepting.join(_END_S)
            self._looking.join(_END_S)
        self._listener.close()
        with self._lock:
            for connection in self._ears:
                _hang_up(connection)
        self._sender.close()

    def _orders(self, step: int, version: int) -> list[RolloutOrder]:
        return [
            RolloutOrder(step=step, place=place, numbers=tuple(numbers), version=version)
            for place, numbers in enumerate(self._numbers)
        ]

    def _hand_out(self) -> None:
        """Send orders to who is free; the lock is held."""
        while pair := self._book.next():
            connection, order = pair
            try:
                connection.send_bytes(pack_order(order))
            except OSError:  # its thread will see that too
                self._book.lose(connection)

    def _look(self) -> None:
        """Several times in each lease, see who has said nothing.

        Looks are counted, not seconds: where this process itself stood still, nobody was silent.
        """
        while not self._closed.wait(self._config.lease_s / _LOOKS_PER_LEASE):
            with self._lock:
                for ear in self._ears.values():
                    ear.quiet += 1
                for connection in self._silent():
                    self._suspend(connection, self._ears[connection])
                self._hand_out()

    def _silent(self) -> list[Connection]:
        """Return the replicas whose lease has ended; the lock is held."""
        return [each for each, ear in self._ears.items() if ear.quiet > _LOOKS_PER_LEASE]

    def _suspend(self, connection: Connection, ear: _Ear) -> None:
        """Give the work of a silent replica to others, or have it begin anew; the lock is held."""
        num, who, end = self._book.suspend(connection), "a replica", ""
        if self.on_hung is not None and ear.replica is not None:
            who, end = f"{ear.replica.name} (process {ear.replica.pid})", "it is killed, and "
            self.on_hung(ear.replica)
        is_first = ear.quiet == _LOOKS_PER_LEASE + 1
        if is_first and (num or end):
            click.echo(
                f"rank {self._rank}: {who} said nothing for {self._config.lease_s:g} s; {end}its "
                f"work ({num} micro-batches) is given to others",
                err=True,
            )

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                connection = self._listener.accept()
            except OSError:
                continue  # it went away again
            with self._lock:
                self._ears[connection] = _Ear()
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: Connection) -> None:
        """Take what a replica sends until it is lost; an empty message says that it is free."""
        with connection:
            try:
                deliver_challenge(connection, self._place.token.encode())
                answer_challenge(connection, self._place.token.encode())
                self._take_all(connection)
            except WfmError as error:
                self._arrived.put(error)
            except (EOFError, OSError, AuthenticationError):  # lost, or without the token
                with self._lock:
                    self._book.lose(connection)
                    self._hand_out()
            with self._lock:
                del self._ears[connection]

    def _take_all(self, connection: Connection) -> None:
        while True:
            data = connection.recv_bytes()
            with self._lock:
                ear = self._ears[connection]
                ear.quiet, ear.replica = 0, started_replica(data) or ear.replica
                self._book.wake(connection)
                if ear.replica is not None:
                    self.on_heard(ear.replica)
                if not data:
                    self._book.free(connection)
                self._hand_out()
            if data and not is_pulse(data):
                self._take_in(parse_rollout(data))

    def _take_in(self, message: RolloutMessage) -> None:
        with self._lock:
            is_wanted = self._book.bring(message.step, message.place)
        if is_wanted:
            self._arrived.put(message)


def _hang_up(connection: Connection) -> None:
    """End a connection that another thread reads, which sees that and closes it."""
    with socket.socket(fileno=os.dup(connection.fileno())) as line, contextlib.suppress(OSError):
        line.shutdown(socket.SHUT_RDWR)
