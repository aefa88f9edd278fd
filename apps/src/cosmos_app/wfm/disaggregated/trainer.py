"""The side of a run that trains: it publishes weights and waits for samples.

Replicas connect to every rank and send micro-batches, of at most ``max_lag`` steps more than the
one that is waited for. One that ends before the run does ends the wait for samples with an error.
"""

import queue
import threading
import time
from collections.abc import Mapping
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import cast

from torch import Tensor

from cosmos_app.errors import RunError
from cosmos_app.roles.process import own_address
from cosmos_app.wfm.disaggregated.meeting import Place, remove_place, write_place
from cosmos_weightsync import SenderConfig, WeightSender, shards_of
from cosmos_wfm import DisaggregatedConfig, Rollout, StepParts, parse_rollout


class ReplicaLostError(RunError):
    """Raised when the samples of a step did not come: a replica ended, or was too slow."""


class ReplicaRollouts:
    """A ``RemoteRollouts`` of one rank.

    Nothing listens before the first version is published, which says from which step on samples are
    wanted.
    """

    def __init__(
        self,
        weights: Mapping[str, Tensor],
        parts: StepParts,
        *,
        config: DisaggregatedConfig,
        output: Path,
        rank: int,
        token: str,
    ) -> None:
        """Get ready.

        Args:
            weights: that replicas draw with.
            parts: how the samples of a step are divided.
            config: how many replicas, and how long they may take.
            output: directory of the run.
            rank: of this process along the data.
            token: that replicas have to show; the same for all ranks.
        """
        self._config = config
        self._output = output
        self._rank = rank
        self._num_ranks = parts.num_ranks
        self._num_places = len(parts.of_rank(rank))
        self._token = token
        host = own_address()
        self._sender = WeightSender(
            shards_of(weights.items()),
            rank=rank,
            num_ranks=parts.num_ranks,
            config=SenderConfig(token=token, bind_host=host),
        )
        self._listener = Listener((host, 0), authkey=token.encode())
        self._arrived: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._kept: dict[tuple[int, int], Rollout] = {}
        self._connections: list[Connection] = []
        self._threads: list[threading.Thread] = []
        self._closed = threading.Event()

    def publish(self, version: int) -> None:
        """Let replicas fetch the weights as they are now; the first time, let them connect."""
        self._sender.publish(version)
        if not self._threads:
            self._start(self._accept)
            host, port = cast("tuple[str, int]", self._listener.address)
            place = Place(
                host=host,
                port=port,
                weights=self._sender.endpoint,
                token=self._token,
                num_ranks=self._num_ranks,
                replicas=self._config.replicas,
                first_step=version,
            )
            write_place(self._output, self._rank, place)

    def take(self, step: int) -> list[Rollout]:
        """Return this rank's micro-batches of a step.

        Raises:
            ReplicaLostError: if one of them did not come.
        """
        end = time.monotonic() + self._config.deadline_s
        wanted = [(step, place) for place in range(self._num_places)]
        while missing := [key for key in wanted if key not in self._kept]:
            try:
                data = self._arrived.get(timeout=max(0.0, end - time.monotonic()))
            except queue.Empty:
                raise ReplicaLostError(
                    f"rank {self._rank}: micro-batch {missing[0][1]} of step {step} did not come "
                    f"in {self._config.deadline_s:g} s; {len(self._connections)} of "
                    f"{self._config.replicas} replicas are connected"
                ) from None
            if data is None:
                raise ReplicaLostError(
                    f"rank {self._rank}: a rollout replica ended before step {step} was drawn: "
                    f"micro-batch {missing[0][1]} is missing; see its output"
                )
            message = parse_rollout(data)
            self._kept[message.step, message.place] = message.rollout
        return [self._kept.pop(key) for key in wanted]

    def lose(self) -> None:
        """Have ``take`` raise: a replica has ended that never connected; from any thread."""
        self._arrived.put(None)

    def close(self) -> None:
        """Let replicas go; may be called twice."""
        remove_place(self._output, self._rank)
        self._closed.set()
        self._listener.close()
        for connection in self._connections:
            connection.close()
        self._connections.clear()
        self._sender.close()

    def _start(self, target: object, *arguments: object) -> None:
        thread = threading.Thread(target=target, args=arguments, daemon=True)  # pyright: ignore
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                connection = self._listener.accept()
            except (OSError, EOFError, AuthenticationError):
                continue  # closed, or somebody without the token
            self._connections.append(connection)
            self._start(self._receive, connection)

    def _receive(self, connection: Connection) -> None:
        """Take what a replica sends; an empty message says that it has drawn everything."""
        try:
            while data := connection.recv_bytes():
                self._arrived.put(data)
        except (EOFError, OSError):
            self._arrived.put(None)
