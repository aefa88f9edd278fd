"""What can go wrong with the input of an algorithm, as one small tree of errors."""


class AlgosError(Exception):
    """Any error raised by this package on purpose."""


class AlgorithmConfigError(AlgosError, ValueError):
    """A configuration that no algorithm has: raised on construction, names the field."""


class TrajectoryError(AlgosError, ValueError):
    """A trajectory that cannot be trained on: raised by ``collate``, names the sample."""


class ModelHeadError(AlgosError, TypeError):
    """A model whose output head is not where log-probabilities need it: raised on first use."""
