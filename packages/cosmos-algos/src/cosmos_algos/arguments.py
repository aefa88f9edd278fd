"""What callers may hand over: tensors that belong together, and names that exist.

Torch broadcasts what does not fit and ``gather`` takes what is too short, so a mistake in a loop of
one's own would train on something else without a word.
"""

import math
from collections.abc import Callable, Hashable, Mapping, Sequence, Sized
from typing import Any, cast

import torch
from torch import Tensor

from cosmos_algos.errors import AlgorithmConfigError, ShapeError
from cosmos_core import choices as known


def check_same_shape(subject: str, tensors: Mapping[str, Tensor]) -> None:
    """Refuse tensors of different shapes.

    Raises:
        ShapeError: names all of them.
    """
    if len({tuple(tensor.shape) for tensor in tensors.values()}) > 1:
        raise ShapeError(f"{subject}: {_shapes(tensors)}; they must have one shape")


def check_same_rank(subject: str, tensors: Mapping[str, Tensor]) -> None:
    """Refuse tensors that do not lie over each other: a 1 may be stretched, nothing else.

    Raises:
        ShapeError: names all of them.
    """
    shapes = [tensor.shape for tensor in tensors.values()]
    if len({len(shape) for shape in shapes}) > 1:
        raise ShapeError(
            f"{subject}: {_shapes(tensors)}; they must have as many dimensions as each other "
            "(one number for each sample is values[:, None])"
        )
    if any(len({*sizes} - {1}) > 1 for sizes in zip(*shapes, strict=True)):
        raise ShapeError(f"{subject}: {_shapes(tensors)}; they must have one shape")


def check_mask(subject: str, mask: Tensor) -> None:
    """Refuse a mask of numbers, which indexes or counts where one of truth values picks.

    Raises:
        ShapeError: names the mask and its type.
    """
    if mask.dtype != torch.bool:
        raise ShapeError(
            f"{subject} is a mask of {mask.dtype}; it must be of truth values: .bool()"
        )


def check_whole(subject: str, numbers: Tensor) -> None:
    """Refuse what cannot be indexed by.

    Raises:
        ShapeError: names the tensor and its type.
    """
    if numbers.is_floating_point() or numbers.is_complex() or numbers.dtype == torch.bool:
        raise ShapeError(f"{subject} is of {numbers.dtype}; it must be of whole numbers: .long()")


def check_lengths(subject: str, columns: Mapping[str, Sized]) -> None:
    """Refuse columns that do not have an entry for each sample.

    Raises:
        ShapeError: names all of them.
    """
    if len({len(column) for column in columns.values()}) > 1:
        found = ", ".join(f"{len(column)} {name}" for name, column in columns.items())
        raise ShapeError(f"{subject}: {found}; there must be one of each for each sample")


def check_choice(field: str, value: str, choices: Any) -> None:
    """Refuse a name that is none of a ``Literal``'s, which type checkers see and Python does not.

    Args:
        field: where it was given.
        value: the name.
        choices: the ``Literal``.

    Raises:
        AlgorithmConfigError: names the field and what there is.
    """
    known.check_choice(field, value, choices, error=AlgorithmConfigError)


def check_coefficients(subject: str, numbers: Mapping[str, float]) -> None:
    """Refuse factors of a loss that turn it round, or that make it infinite or no number.

    Args:
        subject: whose they are.
        numbers: by the names of their fields.

    Raises:
        AlgorithmConfigError: names the first that is below 0 or not finite.
    """
    _check_each(subject, numbers, lambda value: 0.0 <= value < math.inf, "0 or more, and finite")


def check_counts(subject: str, numbers: Mapping[str, int]) -> None:
    """Refuse how many there are of something, or 0 for none, if it is negative.

    Args:
        subject: whose they are.
        numbers: by the names of their fields.

    Raises:
        AlgorithmConfigError: names the first that is below 0.
    """
    _check_each(subject, numbers, lambda value: value >= 0, "0 or more")


def check_scales(subject: str, numbers: Mapping[str, float]) -> None:
    """Refuse what is divided by, or without which nothing would be learned, if it is 0.

    Args:
        subject: whose they are.
        numbers: by the names of their fields.

    Raises:
        AlgorithmConfigError: names the first that is not above 0, or not finite.
    """
    _check_each(subject, numbers, lambda value: 0.0 < value < math.inf, "above 0, and finite")


def check_fractions(subject: str, numbers: Mapping[str, float]) -> None:
    """Refuse what is no part of a whole.

    Args:
        subject: whose they are.
        numbers: by the names of their fields.

    Raises:
        AlgorithmConfigError: names the first that is not in [0, 1].
    """
    _check_each(subject, numbers, lambda value: 0.0 <= value <= 1.0, "in [0, 1]")


def _check_each(
    subject: str,
    numbers: Mapping[str, float] | Mapping[str, int],
    is_right: Callable[[float], bool],
    wanted: str,
) -> None:
    for name, value in numbers.items():
        if not is_right(value):
            raise AlgorithmConfigError(f"{subject}: {name} {value} must be {wanted}")


def group_keys(groups: Sequence[Hashable] | Tensor) -> Sequence[Hashable]:
    """Return groups that equal each other; a tensor's elements do so as numbers only.

    Raises:
        ShapeError: if a tensor does not have one number for each sample.
    """
    if not isinstance(groups, Tensor):
        return [_key(group) for group in groups]
    if groups.dim() != 1:
        raise ShapeError(f"groups {tuple(groups.shape)}; they must be [N], one for each sample")
    return cast("Sequence[Hashable]", groups.tolist())


def _key(group: Hashable) -> Hashable:
    """Return a tensor's number: as a key no tensor equals another, each would be its own group."""
    if not isinstance(group, Tensor):
        return group
    if group.numel() != 1:
        raise ShapeError(
            f"groups: an entry is a tensor {tuple(group.shape)}; it must be one number"
        )
    return group.item()


def _shapes(tensors: Mapping[str, Tensor]) -> str:
    return ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in tensors.items())
