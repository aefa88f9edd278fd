"""Errors of the app, and which errors of the packages end a command with a message.

Exit codes: 1 the run failed, 2 the recipe or its files are wrong, 3 stopped before the last step.
A run that got no further ends with 2 if the same recipe would do so again, otherwise with 1.
"""

import errno
import sys
from collections.abc import Mapping, Sequence

from cosmos_core.errors import CosmosError

_OF_THE_MACHINE = {errno.EACCES, errno.EDQUOT, errno.ENOSPC, errno.EPERM, errno.EROFS}
PARENTS: Mapping[str, Sequence[str]] = {
    "cosmos_algos": ("AlgosError",),
    "cosmos_parallel": ("ParallelError",),
    "cosmos_rollout": ("RolloutError",),
    "cosmos_weightsync": ("WeightSyncError",),
    "cosmos_wfm": ("WfmError",),
}
"""Parents of the errors of packages."""
STAYING: Mapping[str, Sequence[str]] = {
    "cosmos_core.bus": ("CodeVersionError",),
    "cosmos_core.config": ("ConfigError",),
    "cosmos_core.rundir": ("NotARunDirectoryError", "RunNotWritableError"),
    "cosmos_algos": ("AlgorithmConfigError", "ModelHeadError", "RewardError"),
    "cosmos_parallel": (
        "AdapterError",
        "CheckpointMismatchError",
        "CheckpointPlaceError",
        "FreezeError",
        "MeshError",
        "ModelMismatchError",
        "ModelNotFoundError",
        "NonFiniteStepError",
        "OptimizerError",
        "PackingError",
        "PrecisionError",
        "SftDataError",
    ),
    "cosmos_rollout": (
        "EngineSettingsError",
        "PromptDataError",
        "RewardCodeError",
        "UserCodeError",
    ),
    "cosmos_wfm": ("CaptionDataError", "PipelineError", "WfmConfigError"),
}
"""Errors of packages that the same recipe and files would raise again."""
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


class UnrewardedSamplesError(DataError):
    """Raised when a run has ended because a reward gave no sample a finite number: names it."""


class EqualRewardsError(DataError):
    """Raised when a run has ended because no group it sampled had rewards that differ."""


class FailingGroupsError(RunError):
    """Raised when a run has ended because every group failed for too long: says of what."""


class StandstillError(RunError):
    """Raised when a run has ended because somebody was waited for in vain: says for whom."""


class DeadlyStepError(RunError):
    """Raised when a run has ended because policy replicas died of the same step: says of what."""


class StarvedSlotsError(RunError):
    """Raised by 'check' when a recipe has more rollout slots than its admission can fill."""


class HungSinkError(RunError):
    """Raised when a run is over and a sink does not return from a call: names the sink."""


class EmptyGroupError(RunError):
    """Raised on a step with a group that has no completed sample: names step and group."""


class MixedUpSampleError(RunError):
    """Raised where what is stored under a sample's key is not the sample that a step was given."""


class WrongStreamError(RunError):
    """Raised when a run is to go on with other examples than those of its checkpoint."""


class NothingToResumeError(RunError):
    """Raised when there is no run or no checkpoint where one is needed."""


class ChildFailedError(RunError):
    """Raised when a child died more often than it may be restarted; holds the tail of its log."""


class ServerMismatchError(RunError):
    """Raised for a server that has other tokens than the recipe's model, or takes too few."""


class ServerFailedError(RunError):
    """Raised by 'evaluate' if a server fails at all it is asked, or no answer has a reward."""


class DashboardAddressError(RunError):
    """Raised when the address of the dashboard cannot be had, as when its port is in use."""


class ChildRefusedError(ChildFailedError):
    """Raised when a child would refuse its recipe or files again; it is not restarted."""


def expected_errors() -> tuple[type[Exception], ...]:
    """Return the errors that are a message and an exit code, not a traceback."""
    return RunError, CosmosError, *imported(PARENTS)


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
    own = (
        DashboardAddressError,
        DataError,
        WrongStreamError,
        NothingToResumeError,
        ServerMismatchError,
        StarvedSlotsError,
        ChildRefusedError,
    )
    return *own, *imported(STAYING)


def imported(named: Mapping[str, Sequence[str]]) -> tuple[type[Exception], ...]:
    """Return errors of packages that are imported; those of others cannot have been raised.

    To import a package to say what went wrong would take seconds.

    Args:
        named: their names, by package.
    """
    return tuple(
        getattr(sys.modules[package], name)
        for package, names in named.items()
        if package in sys.modules
        for name in names
    )
