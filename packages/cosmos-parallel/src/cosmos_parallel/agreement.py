"""What ranks do together with a place that all of them see: it is done on all, or fails on all.

What is there is asked of one rank, and what it says holds for all: file systems of several machines
may show each of them something else for a while.
"""

from collections.abc import Callable
from pathlib import Path
from typing import NoReturn, TypeVar

import torch
import torch.distributed as dist

from cosmos_parallel.errors import CheckpointError
from cosmos_parallel.mesh import TrainingMesh

Found = TypeVar("Found")
_NONE = -1
_FAILED = -2


class Agreement:
    """The ranks of a replica before a place; every rank calls each method, in the same order.

    `on_all` and `as_first` have a group each: one may be called by a thread that works in the
    background, and the other by the one that trains.

    Attributes:
        group: of `on_all`, for more of what its thread does; ``None`` for one rank by itself.
    """

    def __init__(self, place: Path | str, mesh: TrainingMesh) -> None:
        """Make the groups.

        Args:
            place: named in errors.
            mesh: the ranks.
        """
        self._place = place
        self._is_first = mesh.process.rank == 0
        self.group = _private_group() if mesh.is_distributed else None
        self._asking = _private_group() if mesh.is_distributed else None

    def on_all(self, action: Callable[[], Found]) -> Found:
        """Do ``action`` on every rank and return what it gives; if it failed on one, fail on all.

        Raises:
            CheckpointError: on every rank.
        """
        failure: Exception | None = None
        found: list[Found] = []
        try:
            found.append(action())
        except Exception as error:  # noqa: BLE001 - clients of stores raise anything; others wait
            failure = error
        if self.group is not None:
            failed = torch.tensor(int(failure is not None))
            dist.all_reduce(failed, op=dist.ReduceOp.MAX, group=self.group)
            if failed and failure is None:
                raise self._failed_elsewhere()
        if failure is not None:
            self._fail(failure)
        return found[0]

    def as_first(self, ask: Callable[[], int | None]) -> int | None:
        """Return the number, 0 or more, that rank 0 finds, on every rank; the others do not ask.

        Raises:
            CheckpointError: on every rank, if it could not find out.
        """
        failure: Exception | None = None
        found: int | None = None
        try:
            found = ask() if self._is_first else None
        except Exception as error:  # noqa: BLE001 - as above
            failure = error
        if self._asking is not None:
            told = torch.tensor(_FAILED if failure else _NONE if found is None else found)
            dist.broadcast(told, src=0, group=self._asking)
            found = None if told == _NONE else int(told)
        if failure is not None:
            self._fail(failure)
        if found == _FAILED:
            raise self._failed_elsewhere()
        return found

    def _failed_elsewhere(self) -> CheckpointError:
        return CheckpointError(f"another rank could not use {self._place}; see its log")

    def _fail(self, failure: Exception) -> NoReturn:
        if isinstance(failure, CheckpointError):
            raise failure
        what = "" if isinstance(failure, OSError) else f"{type(failure).__name__}: "
        raise CheckpointError(f"checkpoints in {self._place}: {what}{failure}") from failure


def _private_group() -> dist.ProcessGroup:
    group = dist.new_group(backend="gloo")
    assert isinstance(group, dist.ProcessGroup)
    return group
