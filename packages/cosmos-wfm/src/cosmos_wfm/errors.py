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


class RewardError(WfmError, ValueError):
    """Rewards that are not one finite number for each sample: raised when they are asked for."""


class TrainingStoppedError(WfmError):
    """A run that was asked to stop before its end: raised when what it has done is kept."""


class UploadError(WfmError):
    """A save that cannot be copied to an object store: raised after it was written locally."""
