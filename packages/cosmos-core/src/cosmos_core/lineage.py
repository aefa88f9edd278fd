"""Which weights are those of a run, once it has fallen back to older ones.

A version number counts steps; after a fall-back the same numbers are given out again. A *line* is
the history of a run's fall-backs: the versions that it went back to, in order. Its length is the
number of the *lineage* that trains now, and weights are known by their lineage and version::

    lineage 0   0 ─ 1 ─ 2 ─ 3 ─ 4 ─ 5      the line (2, 3): lineage 0 up to version 2,
    lineage 1           └─ 3 ─ 4 ─ 5       lineage 1 up to version 3, and all of lineage 2
    lineage 2              └─ 4 ─ ...
"""

from collections.abc import Sequence

from cosmos_core.messages import (
    CheckpointSaved,
    Event,
    PublicationSkipped,
    StepFinished,
    VersionPublished,
)


def is_on_line(line: Sequence[int], lineage: int, version: int) -> bool:
    """Tell whether weights belong to a line: whether no fall-back since has left them behind."""
    return all(version <= fork for fork in line[lineage:])


def is_of_lost_weights(event: Event, line: Sequence[int]) -> bool:
    """Tell whether a policy replica speaks of weights that its run has fallen back from."""
    match event:
        case StepFinished(step=step) | CheckpointSaved(step=step):
            return not is_on_line(line, event.lineage, step + 1)
        case VersionPublished() | PublicationSkipped():
            return not is_on_line(line, event.lineage, event.version)
        case _:
            return False
