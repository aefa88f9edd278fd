"""Finds what a recipe names by text: ``module:name``, or ``path/to/file.py:name``."""

import ast
import asyncio
import contextlib
import importlib
import importlib.util
from collections.abc import Callable
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from cosmos_rollout.errors import UserCodeError

_CALLABLE = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def check_reference(reference: str) -> str:
    """Return the name in a reference.

    Raises:
        ValueError: if the text cannot be one.
    """
    if not isinstance(reference, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(
            "function has to be a text, module:function or path/file.py:function, by which other "
            f"processes find it; found {reference!r}"
        )
    module, found, name = reference.rpartition(":")
    if not found or not module or not name.isidentifier():
        raise ValueError(
            f"function {reference!r} has to be module:function or path/file.py:function"
        )
    return name


def find_callable(reference: str) -> None:
    """Look whether there is such a module and name, without running anything of the user's.

    Of a module that is no file only its first package is looked for.

    Raises:
        UserCodeError: if there is none; nothing else says that it can be called.
    """
    where, _, name = reference.rpartition(":")
    if not where.endswith(".py"):
        _find_module(where.partition(".")[0])
        return
    path = Path(where)
    if not path.is_file():
        raise UserCodeError(f"there is no file {path}")
    try:
        module = ast.parse(path.read_bytes(), filename=str(path))
    except (SyntaxError, ValueError) as error:
        raise UserCodeError(f"{path} is not Python: {error}") from error
    if not _names_of(module) & {name, "*", "__getattr__"}:
        own = ", ".join(node.name for node in module.body if isinstance(node, _CALLABLE))
        raise UserCodeError(f"{path} has no function {name}; it has {own or '-'}")


def _find_module(name: str) -> None:
    with contextlib.suppress(ImportError, ValueError):
        # a process that was started as a script does not look where it is run; those of a run do
        here = PathFinder.find_spec(name, [str(Path.cwd())])
        if here is not None or importlib.util.find_spec(name) is not None:
            return
    raise UserCodeError(f"there is no module {name}")


def _names_of(module: ast.Module) -> set[str]:
    """Return all names that a module binds, in functions too; ``*`` for an import of everything."""
    found: set[str] = set()
    for node in ast.walk(module):
        if isinstance(node, _CALLABLE):
            found.add(node.name)
        elif isinstance(node, ast.alias):
            found.add((node.asname or node.name).partition(".")[0])
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
    return found


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


def is_cancelled() -> bool:
    """Return whether the task that runs was itself cancelled.

    A `CancelledError` may also come of a task that the user's code had and cancelled.
    """
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def words_of(error: BaseException) -> str:
    """Return what an exception of the user's says, whose own ``__str__`` may raise as well.

    It becomes part of messages, which are UTF-8: halves of surrogate pairs, as names of files and
    JSON have them, are written out.
    """
    try:
        return str(error).encode("utf-8", "backslashreplace").decode("utf-8")
    except Exception:  # noqa: BLE001 - it may raise anything
        return "(its words cannot be had)"


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
