"""What callers may hand over: tensors that belong together, and names that exist.

Torch broadcasts what does not fit and ``gather`` takes what is too short, so a mistake in a loop of
one's own would train on something else without a word.
"""

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, cast, get_args

from torch import Tensor

from cosmos_algos.errors import AlgorithmConfigError, ShapeError


def check_same_shape(subject: str, tensors: Mapping[str, Tensor]) -> None:
    """Refuse tensors of different shapes.

    Raises:
        ShapeError: names all of them.
    """
    if len({tuple(tensor.shape) for tensor in tensors.values()}) > 1:
        raise ShapeError(f"{subject}: {_shapes(tensors)}; they must have one shape")


def check_same_rank(subject: str, tensors: Mapping[str, Tensor]) -> None:
    """Refuse tensors with different numbers of dimensions: a 1 may be stretched, nothing else.

    Raises:
        ShapeError: names all of them.
    """
    if len({tensor.dim() for tensor in tensors.values()}) > 1:
        raise ShapeError(
            f"{subject}: {_shapes(tensors)}; they must have as many dimensions as each other "
            "(one number for each sample is values[:, None])"
        )


def check_choice(field: str, value: str, choices: Any) -> None:
    """Refuse a name that is none of a ``Literal``'s, which type checkers see and Python does not.

    Args:
        field: where it was given.
        value: the name.
        choices: the ``Literal``.

    Raises:
        AlgorithmConfigError: names the field and what there is.
    """
    if value not in get_args(choices):
        there = ", ".join(map(repr, get_args(choices)))
        raise AlgorithmConfigError(f"{field} is {value!r}; it must be one of {there}")


def group_keys(groups: Sequence[Hashable] | Tensor) -> Sequence[Hashable]:
    """Return groups that equal each other; a tensor's elements do so as numbers only."""
    return cast("Sequence[Hashable]", groups.tolist()) if isinstance(groups, Tensor) else groups


def _shapes(tensors: Mapping[str, Tensor]) -> str:
    return ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in tensors.items())
