"""The checkpoints of a run whose policy replicas may have fallen back from some of them.

A replica that hung while it saved may wake when the others have gone back to an older checkpoint.
What it writes then is of weights that are not the run's: it must not appear, and if it does because
the replica hung at the very last moment, nobody may go on from it.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

from cosmos_core.control import line_of_cut, step_of_cut
from cosmos_core.lineage import is_on_line
from cosmos_parallel import (
    CheckpointRefusedError,
    CheckpointStore,
    Learner,
    RetentionConfig,
    TrainingMesh,
    broadcast_bytes,
)

ReadLine = Callable[[], Sequence[int]]
"""Returns the line of the run as its controller has it; blocks. Called on rank 0."""


class RunCheckpoints:
    """Saves with the controller's cut, which says which weights they are, and finds them again."""

    def __init__(
        self,
        place: Path | str,
        mesh: TrainingMesh,
        read_line: ReadLine = tuple,
        *,
        retention: RetentionConfig | None = None,
    ) -> None:
        """Open the place.

        Args:
            place: a directory that all ranks see, or the URL of an object store.
            mesh: the ranks that save and load.
            read_line: of a run that may fall back while a replica hangs.
            retention: what stays after each save.
        """
        self._read_line = read_line
        self._is_reader = mesh.process.rank == 0
        self._store = CheckpointStore(
            place, mesh, retention=retention, before_it_appears=self._refuse_lost
        )

    def load(self, learner: Learner) -> tuple[int, tuple[int, ...]]:
        """Load what was saved last of the run's weights; return their version and their line.

        They are version 0 if nothing was saved. Every rank calls.

        Raises:
            CheckpointError: if it cannot be read.
        """
        found = json.dumps(self._newest(self._read_line())).encode() if self._is_reader else None
        step: int | None = json.loads(broadcast_bytes(found))
        if step is None:
            return 0, ()
        return step + 1, _line_of(self._store.load(learner, step).extra)

    def save(self, step: int, learner: Learner, cut: bytes) -> str:
        """Write a checkpoint; return its path when it is durable. Every rank calls.

        Raises:
            CheckpointWriteError: if it could not be written.
            CheckpointRefusedError: if the run has gone on without its weights.
        """
        return self._store.save(step, learner, cut)

    def path_of(self, version: int, line: Sequence[int]) -> str:
        """Return where these very weights were saved last of all; empty if they were not."""
        step = self._store.latest()
        if step is None or step != version - 1:
            return ""
        saved = _line_of(self._store.extra(step))
        return self._store.path(step) if len(saved) == len(line) else ""

    def path_for_all(self, version: int, line: Sequence[int]) -> str:
        """Return the same as rank 0 finds it; every rank calls."""
        found = self.path_of(version, line).encode() if self._is_reader else None
        return broadcast_bytes(found).decode()

    def _newest(self, line: Sequence[int]) -> int | None:
        for step in reversed(self._store.in_order()):
            if is_on_line(line, len(_line_of(self._store.extra(step))), step + 1):
                return step
        return None

    def _refuse_lost(self, cut: bytes) -> None:
        if not cut:
            return
        line, version, current = _line_of(cut), step_of_cut(cut), self._read_line()
        if not is_on_line(current, len(line), version):
            raise CheckpointRefusedError(
                f"the checkpoint of version {version} came too late: the run has fallen back to "
                f"versions {list(current)}, and these weights are lost"
            )
        for step in self._store.steps():
            if (len(_line_of(self._store.extra(step))), step + 1) > (len(line), version):
                raise CheckpointRefusedError(
                    f"the checkpoint of version {version} came too late: others have gone on, and "
                    f"saved version {step + 1}"
                )


def _line_of(cut: bytes) -> tuple[int, ...]:
    return line_of_cut(cut) if cut else ()
