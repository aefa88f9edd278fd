"""Finds what a recipe names by text: ``module:name``, or ``path/to/file.py:name``."""

import importlib
import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from cosmos_rollout.errors import UserCodeError


def check_reference(reference: str) -> str:
    """Return the name in a reference.

    Raises:
        ValueError: if the text cannot be one.
    """
    module, found, name = reference.rpartition(":")
    if not found or not module or not name.isidentifier():
        raise ValueError(
            f"function {reference!r} has to be module:function or path/file.py:function"
        )
    return name


def load_callable(reference: str) -> Callable[..., Any]:  # of the user's own signature
    """Import the module and return the callable of that name.

    Raises:
        UserCodeError: if there is no such module or callable.
    """
    where, _, name = reference.rpartition(":")
    module = _load_file(Path(where)) if where.endswith(".py") else _load_module(where)
    found = getattr(module, name, None)
    if not callable(found):
        names = [key for key, value in vars(module).items() if callable(value)]
        own = [k for k in names if getattr(vars(module)[k], "__module__", "") == module.__name__]
        raise UserCodeError(
            f"{where} has no function {name}; it has {', '.join(own or names) or '-'}"
        )
    return cast(Callable[..., Any], found)


def _load_module(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UserCodeError(f"cannot import the module {name}: {error}") from error


def _load_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise UserCodeError(f"there is no file {path}")
    spec = importlib.util.spec_from_file_location(f"cosmos_user_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise UserCodeError(f"{path} cannot be imported as Python")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
