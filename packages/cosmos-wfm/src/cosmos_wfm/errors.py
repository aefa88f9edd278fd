"""What can go wrong in cosmos_wfm, as one small tree of errors."""


class WfmError(Exception):
    """Any error raised by this package on purpose."""


class WfmConfigError(WfmError, ValueError):
    """Settings that contradict each other or the model: raised before anything is trained."""


class PipelineError(WfmError):
    """A directory that is no pipeline, or one that no adapter is for: raised on loading."""


class CaptionDataError(WfmError):
    """A data set directory with a broken or missing pair: raised on opening, names the files."""


class RewardRequestError(WfmError, ValueError):
    """A request to a reward service that is not what it must be: raised before it is scored."""


class RewardServiceError(WfmError):
    """A reward service that refused, failed or did not answer in time: raised for its scores."""


class RewardTimeoutError(RewardServiceError):
    """A reward service that had not answered by its deadline: raised for all samples of a request.

    It says nothing of any one of them.
    """


class RewardError(WfmError, ValueError):
    """Rewards that are not one number for each sample, or late: raised where they are asked for."""


class NoRewardsError(RewardError):
    """No sample of several steps in a row has a reward: raised by every rank at the same step.

    What was trained before is in a checkpoint by then.
    """


class TrainingStoppedError(WfmError):
    """A run that was asked to stop before its end: raised when what it has done is kept."""


class SaveError(WfmError):
    """A save that cannot be written, as to a full disk: raised by the rank that writes."""


class UploadError(WfmError):
    """A save that cannot be copied to an object store: raised after it was written locally."""
