"""What runs in the process of a generated program: the program, and then its tests.

Loaded as a file by `sandbox_child`, with the standard library alone. The tests come when the
program's own lines have run, and each answer leaves at once. That the tests were reached to their
end is told by a mark that comes with them; what was answered is judged elsewhere.
"""

import builtins
import collections
import decimal
import json
import math
import numbers
import operator
import os
import socket
import sys
import types
from collections.abc import Callable, Set
from pathlib import Path
from typing import Any

_RELIED_ON = (builtins, math, operator)
_NOT_PLAIN = "?"


def run(program: str) -> dict[str, Any]:
    """Run the program as ``__main__``; return its names."""
    main = types.ModuleType("__main__")
    main.__file__ = program
    sys.argv = [program]
    sys.modules["__main__"] = main
    exec(compile(Path(program).read_bytes(), program, "exec"), vars(main))
    return vars(main)


def run_tested(program: str, line: socket.socket) -> None:
    """Run the program, ask for its tests and run them; the process ends here.

    Whatever the program did to the built-in functions, or put in the place of modules, is undone
    before its tests run.
    """
    send, receive, leave, modules = line.sendall, line.makefile("rb"), os._exit, dict(sys.modules)
    genuine = [(module.__dict__, dict(module.__dict__)) for module in _RELIED_ON]
    names = run(program)
    for content, before in genuine:  # the built-in functions first
        content.clear()
        content.update(before)
    _restore(modules)
    send(b"?\n")
    tests = json.loads(receive.readline())
    names["__answer__"] = _answering(send)
    exec(compile(tests["text"], "tests.py", "exec"), names)
    send(f"end {tests['mark']}\n".encode())
    leave(0)


def _restore(modules: dict[str, types.ModuleType]) -> None:
    """Put back every module that was there, and drop those that no loader has loaded."""
    sys.settrace(None)
    sys.setprofile(None)
    main = sys.modules["__main__"]
    for name, module in list(sys.modules.items()):
        if getattr(getattr(module, "__spec__", None), "loader", None) is None:
            del sys.modules[name]
    sys.modules.update(modules)
    sys.modules["__main__"] = main


def _answering(send: Callable[[bytes], object]) -> Callable[[int, object], None]:
    def answer(number: int, value: object) -> None:
        send(f"{number} {_text(value)}\n".encode("utf-8", "backslashreplace"))

    return answer


def _text(value: object) -> str:
    """Write a value as a literal of Python; "?" for what has none."""
    try:
        return _literal(value)
    except Exception:  # noqa: BLE001 - methods of the program's classes may raise anything
        return _NOT_PLAIN


def _literal(value: Any) -> str:  # of any class
    if value is None or value is Ellipsis or isinstance(value, bool):
        return repr(value)
    for kind, write in _WRITERS.items():
        if isinstance(value, kind):
            return write(value)
    if hasattr(value, "tolist"):  # an array, or a number of NumPy or torch
        return _literal(value.tolist())
    raise TypeError(f"{type(value)} has no literal")


def _float(value: Any) -> str:
    return repr(float(value)).replace("inf", "1e999")


def _number(value: Any) -> str:
    whole = int(value)
    return repr(whole) if whole == value else _float(value)


def _items(value: Any) -> str:
    return ", ".join(_literal(item) for item in value)


def _mapping(value: Any) -> str:
    return "{" + ", ".join(f"{_literal(k)}: {_literal(value[k])}" for k in value) + "}"


def _set(value: Any) -> str:
    return "{" + _items(value) + "}" if value else "set()"


def _tuple(value: Any) -> str:
    return f"({_items(value)},)" if value else "()"


def _list(value: Any) -> str:
    return f"[{_items(value)}]"


def _inner(value: Any) -> str:
    return _literal(value.data)


def _bytes(value: Any) -> str:
    return repr(bytes(value))


_WRITERS: dict[type, Callable[[Any], str]] = {
    int: int.__repr__,
    float: _float,
    complex: complex.__repr__,
    str: str.__repr__,
    bytes: bytes.__repr__,
    bytearray: _bytes,
    list: _list,
    tuple: _tuple,
    dict: _mapping,
    Set: _set,
    collections.UserList: _inner,
    collections.UserDict: _inner,
    collections.UserString: _inner,
    decimal.Decimal: _number,
    numbers.Number: _number,
}
"""How a value is written; subclasses are written as what they derive from."""
