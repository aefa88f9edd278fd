"""Errors of the app, and which errors of the packages end a command with a message.

Exit codes: 1 the run failed, 2 the recipe or its files are wrong, 3 stopped before the last step.
"""

import errno

from cosmos_core.errors import CosmosError

_OF_THE_MACHINE = {errno.EACCES, errno.EDQUOT, errno.ENOSPC, errno.EPERM, errno.EROFS}
REFUSED = 2
STOPPED = 3


class RunError(RuntimeError):
    """Parent of what can go wrong with a run; the message says what to do about it."""


class InterruptedRunError(RunError):
    """Raised when a run was asked to stop before its last step; it can be resumed."""


class DataError(RunError):
    """Raised when a data file or model directory is missing, empty or malformed."""


class UnusablePromptsError(DataError):
    """Raised when a run has ended because engine, tokenizer and prompts do not fit one another."""


class StarvedSlotsError(RunError):
    """Raised by 'check' when a recipe has more rollout slots than its admission can fill."""


class WrongStreamError(RunError):
    """Raised when a run is to go on with other examples than those of its checkpoint."""


class NothingToResumeError(RunError):
    """Raised when there is no run or no checkpoint where one is needed."""


class ChildFailedError(RunError):
    """Raised when a child died more often than it may be restarted; holds the tail of its log."""


class DashboardAddressError(RunError):
    """Raised when the address of the dashboard cannot be had, as when its port is in use."""


class ChildRefusedError(ChildFailedError):
    """Raised when a child would refuse its recipe or files again; it is not restarted."""


def expected_errors() -> tuple[type[Exception], ...]:
    """Return the errors that are a message and an exit code, not a traceback."""
    from cosmos_algos import AlgosError
    from cosmos_parallel import ParallelError
    from cosmos_rollout import RolloutError
    from cosmos_weightsync import WeightSyncError
    from cosmos_wfm import WfmError

    return (
        RunError,
        CosmosError,
        AlgosError,
        ParallelError,
        RolloutError,
        WeightSyncError,
        WfmError,
    )


def said_of_files(error: Exception) -> str:
    """Return what to say of a file that this machine or its user cannot write or read.

    Empty for any other error, whose traceback is due.
    """
    if not isinstance(error, OSError) or error.errno not in _OF_THE_MACHINE:
        return ""
    subject = f"{error.filename}: " if error.filename else ""
    return f"{subject}{error.strerror}"


def exit_code_of(error: Exception) -> int:
    """Return the exit code of an expected error."""
    if isinstance(error, InterruptedRunError):
        return STOPPED
    return REFUSED if isinstance(error, _errors_that_stay()) else 1


def _errors_that_stay() -> tuple[type[Exception], ...]:
    """Return the errors that the same recipe and files would raise again."""
    from cosmos_algos import AlgorithmConfigError, ModelHeadError, RewardError
    from cosmos_core.bus import CodeVersionError
    from cosmos_core.config import ConfigError
    from cosmos_core.rundir import NotARunDirectoryError, RunNotWritableError
    from cosmos_parallel import (
        AdapterError,
        CheckpointMismatchError,
        CheckpointPlaceError,
        FreezeError,
        MeshError,
        ModelMismatchError,
        ModelNotFoundError,
        OptimizerError,
        PackingError,
        PrecisionError,
        SftDataError,
    )
    from cosmos_rollout import EngineSettingsError, PromptDataError, RewardCodeError, UserCodeError
    from cosmos_wfm import CaptionDataError, PipelineError, WfmConfigError

    return (
        CodeVersionError,
        ConfigError,
        DashboardAddressError,
        DataError,
        NotARunDirectoryError,
        RunNotWritableError,
        WrongStreamError,
        NothingToResumeError,
        StarvedSlotsError,
        ChildRefusedError,
        AlgorithmConfigError,
        EngineSettingsError,
        ModelHeadError,
        AdapterError,
        CaptionDataError,
        CheckpointMismatchError,
        CheckpointPlaceError,
        FreezeError,
        MeshError,
        ModelMismatchError,
        ModelNotFoundError,
        OptimizerError,
        PackingError,
        PipelineError,
        PrecisionError,
        PromptDataError,
        RewardCodeError,
        RewardError,
        SftDataError,
        UserCodeError,
        WfmConfigError,
    )
