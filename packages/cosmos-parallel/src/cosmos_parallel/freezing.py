"""Parameters left as they are, chosen by patterns of names, such as all of a part that sees."""

from collections.abc import Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase

from torch import nn

from cosmos_parallel.errors import FreezeError

_SHOWN = 3


def frozen_names(model: nn.Module, patterns: Sequence[str]) -> frozenset[str]:
    """Return the names of a model's parameters that match one of the patterns.

    Args:
        model: as loaded, before adapters.
        patterns: as file names have them, of whole names: ``model.visual.*``, ``*.bias``.

    Raises:
        FreezeError: if a pattern matches no parameter.
    """
    names = [name for name, _ in model.named_parameters()]
    found: set[str] = set()
    for pattern in patterns:
        matched = [name for name in names if fnmatchcase(name, pattern)]
        if not matched:
            raise FreezeError(
                f"freeze: no parameter of this {type(model).__name__} is called {pattern!r} (there "
                f"is {_near(pattern, names)}; * stands for any text)"
            )
        found |= set(matched)
    return frozenset(found)


def freeze(model: nn.Module, names: frozenset[str]) -> None:
    """Have parameters of these names take no gradient."""
    for name, parameter in model.named_parameters():
        if name in names:
            parameter.requires_grad_(False)


def _near(pattern: str, names: Sequence[str]) -> str:
    near = get_close_matches(pattern, names, n=_SHOWN, cutoff=0.0)
    return ", ".join(near)
