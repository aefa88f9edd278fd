"""Numbers of versions, as callers give them."""

import operator

from cosmos_weightsync.errors import VersionError

__all__ = ["version_number"]


def version_number(version: int) -> int:
    """Return a version as an int of Python, which alone can be told to others.

    A step is often a number of NumPy or a tensor with one element; those will do.

    Raises:
        VersionError: it is no whole number.
    """
    try:
        return operator.index(version)
    except TypeError:
        raise VersionError(
            f"version {version!r} is a {type(version).__name__}; want a whole number"
        ) from None
