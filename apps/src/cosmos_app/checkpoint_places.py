"""Where the checkpoints of a run lie, and what is said of those that are there when it begins."""

from pathlib import Path
from typing import Protocol

from rich.console import Console

from cosmos_core.rundir import RunDirectory
from cosmos_parallel import CheckpointStore, ParallelConfig, build_mesh

NO_CHECKPOINT = (
    "[yellow]the run was stopped before its first checkpoint: it begins again at step 0[/]"
)


class NamesPlace(Protocol):
    """The settings of a trainer that say where checkpoints go."""

    @property
    def checkpoints(self) -> str:
        """A directory or a URL; empty for the run directory."""
        ...


def checkpoints_of(trainer: NamesPlace, run: RunDirectory) -> Path | str:
    """Return where the checkpoints of a run lie."""
    return trainer.checkpoints or run.checkpoints


def open_checkpoints(trainer: NamesPlace, run: RunDirectory) -> CheckpointStore:
    """Return the checkpoints of a run, to be looked at by one process.

    Raises:
        CheckpointPlaceError: if nothing knows how to reach where they should lie.
    """
    return CheckpointStore(checkpoints_of(trainer, run), build_mesh(ParallelConfig()))


def tell_beginning(
    newest: int | None, trainer: NamesPlace, console: Console, *, is_resumed: bool
) -> None:
    """Say what people may not expect: that a resumed run begins anew, or a new one goes on.

    Args:
        newest: the step of the newest checkpoint, if there is one.
        trainer: says where it lies.
        console: where to say it.
        is_resumed: whether somebody asked for the run to go on.
    """
    if newest is None and is_resumed:
        console.print(NO_CHECKPOINT)
    elif newest is not None and not is_resumed:
        console.print(
            f"goes on from the checkpoint of step {newest + 1} in {trainer.checkpoints}",
            soft_wrap=True,
        )
