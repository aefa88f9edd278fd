"""Policy replicas that come and go: who takes the step to come, and with whose weights.

::

    Train(5) ─► meet ─► seat 1 of 2, step 5 ─► learner.step ─► taken ─► Train(6) ─► meet ...
                 ▲  (behind: a peer's state first)   │ a member died: void for all
                 └───────────────────────────────────┘
"""

import time
import uuid
from collections.abc import Callable

from cosmos_app.control_files import read_meeting_place
from cosmos_app.errors import RunError
from cosmos_app.roles.process import unwatched_groups
from cosmos_core.rundir import RunDirectory
from cosmos_parallel import (
    ElasticConfig,
    ElasticReplicas,
    Learner,
    Meeting,
    Seat,
    TrainingMesh,
    open_meeting_store,
)

_MEET_S = 120.0
_RETRY_S = 0.2


def open_replicas(
    run: RunDirectory,
    replica: str,
    mesh: TrainingMesh,
    config: ElasticConfig,
    *,
    meet_s: float = _MEET_S,
) -> ElasticReplicas:
    """Take this rank's place among replicas that come and go; every rank of the replica calls.

    From then on the others wait for this replica as long as it is alive.

    Args:
        run: whose replicas they are.
        replica: this one.
        mesh: its ranks.
        config: how long they wait for each other.
        meet_s: seconds that the run's meeting place is waited for.

    Raises:
        RunError: if the run's meeting place did not come up in time.
    """
    address = _await_meeting_place(run, replica, meet_s)
    # a process that comes back must not be taken for the one that died
    name = f"{replica}.{uuid.uuid4().hex[:8]}"
    meeting = Meeting(address, name, config) if mesh.process.rank == 0 else None
    return ElasticReplicas(meeting, open_meeting_store(address, config), mesh, config)


def _await_meeting_place(run: RunDirectory, replica: str, meet_s: float) -> str:
    for _ in range(int(meet_s / _RETRY_S)):
        address = read_meeting_place(run)
        if address is not None:
            return address
        time.sleep(_RETRY_S)
    raise RunError(f"{replica} waited {meet_s:g} s for the meeting place of its run")


class Gathering:
    """The members of the step to come, met when there is a step and no earlier.

    Whoever shows signs of life is waited for, so a replica shows none before it is given a step.

    Attributes:
        seat: the place of this replica in the step to come; ``None`` before it has met the others.
    """

    def __init__(self, open_: Callable[[], ElasticReplicas]) -> None:
        """Nobody is met yet.

        Args:
            open_: takes this replica's place among the others; called once.
        """
        self.seat: Seat | None = None
        self._open = open_
        self._replicas: ElasticReplicas | None = None

    def meet(self, learner: Learner, step: int, line: tuple[int, ...] = ()) -> Seat:
        """Return the seat in the step to come; one that was not used yet is kept.

        Args:
            learner: of this replica; has a peer's state afterwards if it was behind.
            step: the one that it would take.
            line: of its weights.

        Raises:
            FallenBackError: if the others have fallen back from these weights.
            ReplicaLostError: if there was no quorum in time, or no member has a usable state.
        """
        if self.seat is None:
            replicas = self._opened()
            with unwatched_groups():
                self.seat = replicas.meet(learner, step, line=line)
        return self.seat

    def claims(self, what: str, is_done: Callable[[], bool]) -> bool:
        """Settle who does what one of those that are left does; see `ElasticReplicas.claim`."""
        return self._opened().claim(what, is_done)

    def once(self, what: str, do: Callable[[], None]) -> None:
        """Have one of those that are left do what has to be done; see `ElasticReplicas.once`."""
        self._opened().once(what, do)

    def _opened(self) -> ElasticReplicas:
        if self._replicas is None:
            self._replicas = self._open()
        return self._replicas

    def leave_seat(self) -> None:
        """Give up a seat that was not used, as the run fell back from its step."""
        if self.seat is not None:
            self.lose()

    def take(self) -> None:
        """Note that the step of this seat was taken: the next one needs a new seat."""
        self.seat = None

    def lose(self) -> None:
        """Note that the step of this seat is void: the same step needs a new seat."""
        self.seat = None
        if self._replicas is not None:
            self._replicas.lose()

    def close(self) -> None:
        """Leave the others; may be called twice."""
        if self._replicas is not None:
            self._replicas.close()
