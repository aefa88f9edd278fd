"""Finds calls, awaits, blocks and loops that may wait for somebody without a deadline.

What blocks is told by the text of one function: what it calls, awaits or enters. It has a deadline
if it is given one, if `asyncio.timeout` or `asyncio.wait_for` is around it, if its function sets
one on the socket or polls first, or if what it waits for was killed or cancelled there. A loop that
sleeps between two looks has one if anything in it is called a deadline or a timeout.
"""

import ast
from collections.abc import Iterator
from typing import NamedTuple

_WITHOUT_ARGUMENTS = {"get", "join", "wait", "acquire", "result", "communicate", "accept"}
_RECEIVING = {"recv", "recv_into", "recv_bytes", "sendall"}
_WITH_TIMEOUT = {"urlopen", "create_connection", "check_output", "check_call", "as_completed"}
_OF_OTHERS = {"gather", "shield"}
_LINES = {"readline", "readexactly", "readuntil"}
_EXECUTORS = {"ThreadPoolExecutor", "ProcessPoolExecutor"}
_QUEUES = {"Queue", "LifoQueue", "PriorityQueue", "JoinableQueue"}
_SLEEPS = {"sleep", "sleep_ms"}
_DEADLINES = {"timeout", "timeout_s", "deadline"}

Function = ast.FunctionDef | ast.AsyncFunctionDef


class _Place(NamedTuple):
    """Where something stands: in which function, and whether a deadline is around it."""

    function: ast.AST
    is_timed: bool


def waits(tree: ast.AST) -> list[tuple[str, str]]:
    """Return the function and the text of all that may block without a deadline."""
    bounded, timeouts = _bounded_queues(tree), set(_made_by(tree, {"timeout"}))
    return [
        (getattr(place.function, "name", ""), ast.unparse(node).partition("\n")[0])
        for place, node in _nodes(tree, _Place(tree, is_timed=False), timeouts)
        if not place.is_timed and _waits(node, place.function, bounded)
    ]


def _nodes(node: ast.AST, place: _Place, timeouts: set[str]) -> Iterator[tuple[_Place, ast.AST]]:
    """Yield everything with the function around it, and whether one of the timeouts is."""
    for child in ast.iter_child_nodes(node):
        inside = place
        if isinstance(child, Function):
            inside = _Place(child, is_timed=False)
        elif _gives_deadline(child, timeouts):
            inside = place._replace(is_timed=True)
        yield (inside if isinstance(child, ast.AsyncWith) else place), child
        yield from _nodes(child, inside, timeouts)


def _gives_deadline(node: ast.AST, timeouts: set[str]) -> bool:
    """Whether all that a node holds has a deadline."""
    if isinstance(node, ast.AsyncWith):
        return any(_is_timeout(item.context_expr, timeouts) for item in node.items)
    return isinstance(node, ast.Call) and _owner(node) == "asyncio" and _name(node) == "wait_for"


def _is_timeout(entered: ast.expr, timeouts: set[str]) -> bool:
    if isinstance(entered, ast.Call):
        return _name(entered) == "timeout"
    return ast.unparse(entered) in timeouts


def _waits(node: ast.AST, function: ast.AST, bounded: set[str]) -> bool:
    match node:
        case ast.Await(value=ast.Name() | ast.Attribute() | ast.Subscript() as task):
            return f"{ast.unparse(task)}.cancel(" not in ast.unparse(function)
        case ast.AsyncWith(items=items):
            return any(_is_entered_in_vain(item.context_expr) for item in items)
        case ast.With(items=items):
            entered = [item.context_expr for item in items]
            return any(isinstance(each, ast.Call) and _name(each) in _EXECUTORS for each in entered)
        case ast.While():
            return _polls(node)
        case ast.Call():
            return _blocks(node, bounded) and not _has_deadline(node, ast.unparse(function))
        case _:
            return False


def _polls(loop: ast.While) -> bool:
    """Whether a loop looks again and again, with pauses, and nothing in it says for how long."""
    inside = list(_own_nodes(loop))
    names = {_last_name(node).lower() for node in inside}
    if any("deadline" in name or "timeout" in name for name in names):
        return False
    return any(isinstance(node, ast.Call) and _name(node) in _SLEEPS for node in inside)


def _own_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """Yield what is inside, but for functions that are only defined there."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, Function | ast.Lambda):
            yield child
            yield from _own_nodes(child)


def _last_name(node: ast.AST) -> str:
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
        case _:
            return ""


def _is_entered_in_vain(entered: ast.expr) -> bool:
    """Whether an asynchronous block waits for others: a lock, or tasks at its end."""
    if isinstance(entered, ast.Call):
        return _name(entered) == "TaskGroup"
    return not isinstance(entered, ast.Await)


def _blocks(call: ast.Call, bounded: set[str]) -> bool:
    name, owner = _name(call), _owner(call)
    if owner in {"self", "super()"}:
        return False  # that method is looked at itself
    if name in _WITHOUT_ARGUMENTS and not call.args:
        return True
    if name in _RECEIVING | _LINES:
        return bool(owner)
    if owner in {"asyncio", "futures", ""} and name == "wait":
        return True
    return _blocks_by_kind(call, name, owner, bounded)


def _blocks_by_kind(call: ast.Call, name: str, owner: str, bounded: set[str]) -> bool:
    text = ast.unparse(call)
    is_pool = any(word in owner for word in ("thread", "pool", "executor"))
    kinds = {
        "run": owner == "subprocess",
        "gather": owner == "asyncio",
        "shield": owner == "asyncio",
        "wait_for": len(call.args) == 1,
        "put": owner in bounded,
        "flock": "LOCK_NB" not in text and "LOCK_UN" not in text,
        "waitpid": "WNOHANG" not in text,
        "select": len(call.args) == (3 if owner == "select" else 0),
        "shutdown": is_pool and "wait=False" not in text,
    }
    return kinds.get(name, name in _WITH_TIMEOUT)


def _has_deadline(call: ast.Call, around: str) -> bool:
    words = {k.arg for k in call.keywords} | {ast.unparse(each) for each in call.args}
    if words & _DEADLINES:
        return True
    name = _name(call)
    if "poll(" in around and name in _RECEIVING:
        return True
    if name in {*_RECEIVING, "accept"} and ("settimeout(" in around or "_limit(" in around):
        return True
    if name in _OF_OTHERS and ".cancel()" in around:
        return True
    return name == "wait" and "process" in _owner(call) and "kill" in around.lower()


def _bounded_queues(tree: ast.AST) -> set[str]:
    """Return the names of queues that hold so much and no more: others never block who puts."""
    made = _made_by(tree, _QUEUES)
    return {name for name, call in made.items() if call.args or call.keywords}


def _made_by(tree: ast.AST, names: set[str]) -> dict[str, ast.Call]:
    """Return what is assigned a call of one of these names, with that call."""
    found: dict[str, ast.Call] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Call):
            called = ast.unparse(node.value.func).partition("[")[0].rpartition(".")[2]
            if called in names:
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                found.update((ast.unparse(target), node.value) for target in targets)
    return found


def _name(call: ast.Call) -> str:
    function = call.func
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def _owner(call: ast.Call) -> str:
    return ast.unparse(call.func.value) if isinstance(call.func, ast.Attribute) else ""
