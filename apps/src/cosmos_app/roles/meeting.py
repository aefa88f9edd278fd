"""How policy replicas find each other: the first one hosts a store and leaves its address."""

import os
import time
from pathlib import Path

from cosmos_app.children import policy_names
from cosmos_app.errors import RunError
from cosmos_app.roles.process import RunContext, own_address
from cosmos_core.rundir import write_atomic
from cosmos_parallel import (
    ParallelError,
    ProcessContext,
    ReplicaGroup,
    ReplicaMembership,
    StoreReplicaGroup,
    open_store,
)

_MEET_S = 300.0
_RETRY_S = 0.5
_TRY_S = 20.0


def meet_replicas(
    context: RunContext, index: int, process: ProcessContext, *, meet_s: float = _MEET_S
) -> ReplicaGroup:
    """Join the same rank of all policy replicas into a group; blocks until they are there.

    The address lies in the run directory. One that a dead host left behind does not answer, or
    answers for nobody, so the others try again until the new host has written its own.

    Args:
        context: the run.
        index: of this replica.
        process: its rank.
        meet_s: seconds that the others, or the first one, are waited for.

    Raises:
        RunError: if the replicas did not meet in time.
    """
    names = policy_names(context.recipe.policy)
    meeting_point = context.run.path / f"meeting.{process.rank}"
    deadline = time.monotonic() + meet_s
    if index == 0:
        host = own_address()
        store = open_store(host, 0, hosting=True, timeout_s=meet_s)
        write_atomic(meeting_point, f"{host}:{store.port}:{os.getpid()}")
        members = ReplicaMembership(
            names=tuple(names), index=0, epoch=os.getpid(), rank=process.rank
        )
        return StoreReplicaGroup(store, members, timeout_s=meet_s, device_type=process.device_type)
    while (left_s := deadline - time.monotonic()) > 0:
        group = _try_to_join(meeting_point, names, index, process, min(_TRY_S, left_s))
        if group is not None:
            return group
        time.sleep(_RETRY_S)
    raise RunError(f"{names[index]} waited {meet_s:g} s for {names[0]} at {meeting_point}")


def _try_to_join(
    meeting_point: Path, names: list[str], index: int, process: ProcessContext, try_s: float
) -> ReplicaGroup | None:
    if not meeting_point.exists():
        return None
    host, port, epoch = meeting_point.read_text().rsplit(":", 2)
    members = ReplicaMembership(
        names=tuple(names), index=index, epoch=int(epoch), rank=process.rank
    )
    try:
        store = open_store(host, int(port), hosting=False, timeout_s=try_s)
        return StoreReplicaGroup(store, members, timeout_s=_MEET_S, device_type=process.device_type)
    except ParallelError:
        return None
