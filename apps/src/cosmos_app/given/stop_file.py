"""How replicas of a run on given data, which has no controller, are asked to end."""

from cosmos_core.rundir import RunDirectory

_STOP_FILE = "stop"


def forget_stop(run: RunDirectory) -> None:
    """Remove what an earlier launch was asked."""
    (run.path / _STOP_FILE).unlink(missing_ok=True)


def ask_to_stop(run: RunDirectory) -> None:
    """Ask all replicas to end after the step in hand."""
    (run.path / _STOP_FILE).touch()


def is_asked_to_stop(run: RunDirectory) -> bool:
    """Whether somebody asked for that."""
    return (run.path / _STOP_FILE).exists()
