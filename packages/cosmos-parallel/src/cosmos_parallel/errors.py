"""Everything this package raises on purpose, in one small tree."""


class ParallelError(Exception):
    """Any error of this package."""


class MeshError(ParallelError, ValueError):
    """Raised before anything starts: the degrees do not fit the ranks, or are not supported."""


class ModelNotFoundError(ParallelError):
    """Raised on loading: the directory is not a complete Hugging Face model."""


class ModelMismatchError(ParallelError):
    """Raised on loading: the weights in the directory are not those of its config."""


class LossContractError(ParallelError):
    """Raised in a step: what the loss returned is not a sum with its weight."""


class NoBatchError(ParallelError):
    """Raised in a step, on every rank: some rank has no batch and no filler to stand in."""


class PackingError(ParallelError, ValueError):
    """Raised when samples cannot share a row: the model or the lengths do not allow it."""


class PictureError(ParallelError, ValueError):
    """Raised when pictures cannot be read, or do not fit their tokens or the model; says where."""


class OptimizerError(ParallelError, ValueError):
    """Raised before training: no such optimizer or option, or its library is not installed."""


class TokenIdError(ParallelError, ValueError):
    """Raised in a forward pass: a token that the embedding does not have; names its place."""


class SampleLengthError(ParallelError, ValueError):
    """Raised in a forward pass: a sample is longer than the positions that a model has learned."""


class NonFiniteStepError(ParallelError):
    """Raised when too many steps in a row had a loss or a gradient that is not finite."""


class FallenBackError(ParallelError):
    """Raised where a replica has weights that the others fell back from: it has to begin again."""


class ReplicaLostError(ParallelError):
    """Raised when a policy replica did not take part in a reduction before the deadline.

    Attributes:
        missing: names of the replicas that did not arrive; empty when all arrived and the
            connection broke afterwards.
    """

    def __init__(self, message: str, missing: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.missing = missing


class CheckpointError(ParallelError):
    """Raised when a checkpoint cannot be written, is missing, damaged or of another model."""


class CheckpointWriteError(CheckpointError):
    """Raised on all ranks when a checkpoint is not written, as on a full disk; another may be."""


class CheckpointRefusedError(CheckpointError):
    """Raised by a caller's check before a checkpoint appears: nobody wants it, now or later."""


class CheckpointMismatchError(CheckpointError):
    """Raised when a checkpoint is of another model; the next attempt would find the same."""


class CheckpointPlaceError(CheckpointError):
    """Raised when nothing knows how to reach the address that checkpoints should lie at."""


class ExportError(ParallelError):
    """Raised when a model cannot be written in Hugging Face form."""


class PrecisionError(ParallelError, ValueError):
    """Raised before training: the device, the layers or the installation have no 8-bit products."""


class AdapterError(ParallelError):
    """Raised when an adapter cannot be put in, or is not there: names the layers or the package."""


class FreezeError(ParallelError, ValueError):
    """Raised on loading: a pattern of parameters to leave as they are matches none."""


class SftDataError(ParallelError):
    """Raised on reading SFT data: names the file, the line and the field."""
