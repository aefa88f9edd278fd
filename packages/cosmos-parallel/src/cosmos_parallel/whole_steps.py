"""Several updates that are one step: all of them are made, or none.

::

    remembered ─► update ─► update ─► ... ─► step taken
        ▲                     │ a replica was lost
        └──── put back ◄──────┘
"""

from collections.abc import Generator
from contextlib import contextmanager

from cosmos_parallel.errors import ReplicaLostError
from cosmos_parallel.learner import Learner
from cosmos_parallel.learner_state import parts_of, put_parts


@contextmanager
def whole_step(learner: Learner) -> Generator[None]:
    """Undo the updates of the block if it ends with `ReplicaLostError`, which goes on.

    Each update is made by all members or by none, so all who are left go back to the same state.
    It is kept in host memory: weights, optimizer, averages and counts, of this rank's parts.
    Moments of 8 bits come back rounded as they do from a checkpoint, by all alike.

    Args:
        learner: every rank of its replica enters; nobody else changes it inside the block.
    """
    process = learner.mesh.process
    kept = {
        name: (part.device, part.to("cpu", copy=True))
        for name, part in parts_of(learner, process).items()
    }
    try:
        yield
    except ReplicaLostError:
        back = {name: part.to(device) for name, (device, part) in kept.items()}
        put_parts(learner, process, back)
        raise
