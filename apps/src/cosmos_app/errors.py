"""Errors of the app, and which errors of the packages end a command with a message."""

from cosmos_app.supervisor import ChildFailedError


class RunError(RuntimeError):
    """Parent of what can go wrong with a run; the message says what to do about it."""


class InterruptedRunError(RunError):
    """Raised when a run was asked to stop before its last step; it can be resumed."""


class DataError(RunError):
    """Raised when a data file is missing, empty or malformed."""


class NothingToResumeError(RunError):
    """Raised by ``--resume`` when the output directory holds no checkpoint."""
