"""The error tree of cosmos_rollout: every class says when it is raised."""


class RolloutError(Exception):
    """Parent of every error that cosmos_rollout raises by contract."""


class PromptError(RolloutError):
    """Parent of what is wrong with one request; the engine goes on serving the others.

    ``drop_as`` is what the prompt's group is counted as when it is dropped; empty: it is not.
    """

    drop_as = ""


class EmptyPromptError(PromptError):
    """Raised for a request without prompt tokens."""

    drop_as = "empty prompt"


class PromptTooLongError(PromptError):
    """Raised for a prompt that leaves no room for one new token in the model's context."""

    drop_as = "prompt too long"


class TokenRangeError(PromptError):
    """Raised for a prompt token that the model's vocabulary does not have."""

    drop_as = "prompt not of this vocabulary"


class PromptTextError(PromptError):
    """Raised for a prompt that the tokenizer or its chat template does not take."""

    drop_as = "prompt that the tokenizer does not take"


class PictureError(PromptError):
    """Raised for pictures and videos that cannot be read, or do not fit the marks in the prompt."""

    drop_as = "picture or video that cannot be used"


class PromptRefusedError(PromptError):
    """Raised for a request that a server refuses as a bad one, and would refuse again."""

    drop_as = "prompt that the server refuses"


class DuplicateRequestError(PromptError):
    """Raised for a request whose id another request in flight has."""


class NoPicturesError(PromptError):
    """Raised for a request with pictures or videos to a model, or an engine, that takes none."""


class WrongLoopError(RolloutError):
    """Raised when an engine or a pool is used from another event loop than its own."""


class EngineError(RolloutError):
    """Parent of what goes wrong with an engine as a whole."""


class EngineStartError(EngineError):
    """Raised when an engine cannot be started with the model and settings it was given."""


class EngineSettingsError(EngineStartError):
    """Raised when an engine refuses what it was given, and would refuse it again."""


class EngineMemoryError(EngineStartError):
    """Raised when the device has too little memory left to start the engine on."""


class EngineDeadError(EngineError):
    """Raised to every request in flight, and to later ones, when the engine's process is gone."""


class EngineClosedError(EngineError):
    """Raised when an engine is used after `aclose`."""


class EnginePausedError(EngineError):
    """Raised by `load_version` on an engine that its user has paused: resume it first."""


class WeightLoadError(EngineError):
    """Raised when new weights could not be loaded; the engine still has the ones before."""


class TeacherError(RolloutError):
    """Raised when no teacher scored a sample; costs that sample and no other."""


class RewardError(RolloutError):
    """Raised for a reward that cannot be used at all: unknown function, wrong signature.

    Also for one that a sample is not given; ``passes`` says that another time it may be, as by a
    service that is away.
    """

    def __init__(self, message: str, *, passes: bool = False) -> None:
        """Say what is wrong."""
        super().__init__(message)
        self.passes = passes


class RewardCodeError(RewardError):
    """Raised for a reward whose code cannot be imported or called, however often it is tried."""


class RewardRequestError(RolloutError):
    """Raised for a request to a reward service that holds no sample, saying what is wrong."""


class RewardPoolClosedError(RolloutError):
    """Raised when a reward pool is used after `aclose`."""


class SandboxError(RolloutError):
    """Raised when generated code cannot be run as isolated as it was asked for."""


class UserCodeError(RolloutError):
    """Raised when a function that a recipe names cannot be imported, or is not there."""


class EpisodeError(RolloutError):
    """Raised by an environment whose episode cannot go on; costs that sample and no other."""


class PromptDataError(RolloutError):
    """Raised for prompt data that cannot be read; names the file, the line and the field."""
