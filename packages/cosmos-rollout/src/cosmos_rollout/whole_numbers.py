"""Whole numbers of any library as Python's own: tokens and seeds come of numpy and torch, too."""

import operator
from collections.abc import Iterable, Sequence
from typing import cast


def whole(value: object, what: str) -> int:
    """Return a whole number of whatever type as an ``int``.

    Raises:
        ValueError: if it is none; ``what`` says of what.
    """
    try:
        return operator.index(cast(int, value))
    except TypeError as error:
        raise ValueError(f"{what} has to be a whole number, found {value!r}") from error


def token_tuple(tokens: object, what: str) -> tuple[int, ...]:
    """Return token ids as a tuple of ``int``: of a list, an array or a tensor of one dimension.

    Raises:
        ValueError: if they are something else.
    """
    if isinstance(tokens, str):
        raise ValueError(f"{what} has to be token ids, found the text {tokens[:40]!r}: tokenize it")
    listed = getattr(tokens, "tolist", None)  # of arrays and tensors, whose own elements are slow
    given = cast(Iterable[object], listed() if listed is not None else tokens)
    if not isinstance(given, Sequence):
        raise ValueError(f"{what} has to be a sequence of token ids, found {given!r}"[:200])
    if given and isinstance(given[0], Sequence):
        raise ValueError(f"{what} has to be the tokens of one prompt, found {len(given)} rows")
    try:
        return tuple(map(operator.index, cast(Sequence[int], given)))
    except TypeError as error:
        raise ValueError(f"{what} has to be whole numbers: {error}") from error
