"""What can go wrong with the input of an algorithm, as one small tree of errors."""


class AlgosError(Exception):
    """Any error raised by this package on purpose."""


class AlgorithmConfigError(AlgosError, ValueError):
    """A configuration that no algorithm has: raised on construction, names the field."""


class TrajectoryError(AlgosError, ValueError):
    """A trajectory that cannot be trained on: raised by ``collate``, names the sample."""


class TokenIdError(TrajectoryError):
    """A token that the vocabulary does not have: raised by ``collate``, names sample and place."""


class ShapeError(AlgosError, ValueError):
    """Tensors of one call that do not belong together: raised at once, names their shapes."""


class RewardError(AlgosError, ValueError):
    """A reward for which an advantage has no meaning: raised on the step, names the sample."""


class EmptyStepError(AlgosError, ValueError):
    """A step without samples, or without a trained token in any: raised before the first batch."""


class MissingScoresError(AlgosError, ValueError):
    """Log-probabilities or values that an algorithm needs and a batch lacks: names the field."""


class PairingError(AlgosError, ValueError):
    """Rows that do not form pairs of a chosen and a rejected sample: names the rows."""


class ModelHeadError(AlgosError, TypeError):
    """A model whose output head is not where log-probabilities need it: raised on first use."""
