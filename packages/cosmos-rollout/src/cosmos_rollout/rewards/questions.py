"""Takes the answers out of tests: a program is asked for values, not told what they should be.

``assert f(2) == 4`` becomes the question ``f(2)``; that 4 is right is known only to the process
that judges. So nothing that a program does to its own interpreter makes a wrong value right.
"""

import ast
import operator
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Any, cast

_ANSWER = "__answer__"
_UNITTEST = "assert unittest.main(exit=False).result.wasSuccessful()"
_DEFINING = (
    ast.FunctionDef,
    ast.AsyncFunctionDef,
    ast.ClassDef,
    ast.Import,
    ast.ImportFrom,
    ast.Pass,
)
_COMPARISONS: Mapping[type[ast.cmpop], Callable[[Any, Any], Any]] = MappingProxyType(
    {
        ast.Eq: operator.eq,
        ast.Lt: operator.lt,
        ast.LtE: operator.le,
        ast.Gt: operator.gt,
        ast.GtE: operator.ge,
        ast.Is: operator.is_,
    }
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """What a value has to be.

    Attributes:
        compare: holds of the value and ``expected`` if the answer is right.
        expected: a plain value.
        is_first: whether ``expected`` is the left side of the comparison.
        times: how often it is asked, at least.
    """

    compare: Callable[[Any, Any], Any]
    expected: Any  # a literal of the test
    is_first: bool
    times: int

    def is_right(self, answer: str) -> bool:
        """Whether this answer, written as a literal, is right."""
        try:
            value = ast.literal_eval(answer)
            sides = (self.expected, value) if self.is_first else (value, self.expected)
            return self.compare(*sides) is True
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            return False


@dataclass(frozen=True, kw_only=True, slots=True)
class AskedTest:
    """A test without its answers.

    Attributes:
        text: what runs behind the program.
        questions: by the number under which the program answers them.
    """

    text: str
    questions: tuple[Question, ...]

    def is_passed(self, answers: Sequence[tuple[int, str]]) -> bool:
        """Whether every question was answered as often as it was asked, and rightly each time."""
        counts = Counter(number for number, _ in answers)
        return all(
            counts[number] >= question.times for number, question in enumerate(self.questions)
        ) and all(
            number < len(self.questions) and self.questions[number].is_right(answer)
            for number, answer in answers
        )


@lru_cache(maxsize=1024)
def ask(test: str) -> AskedTest:
    """Turn the assertions that certainly run into questions; leave the others as they are.

    Those are the assertions of the test itself, and of the functions that it defines and calls in
    lines of their own, as in ``def check(f): ...`` and ``check(double)``; not those in loops,
    conditions and classes.
    """
    tree = _parsed(test)
    if tree is None:
        return AskedTest(text=test, questions=())  # it fails where it runs
    questions: list[Question] = []
    functions = _calls_of_functions(tree.body)
    for statement in tree.body:
        if isinstance(statement, ast.FunctionDef) and statement.name in functions:
            certain = _certain(statement.body)
            asked = _asked(statement.body[:certain], questions, functions[statement.name])
            statement.body = [*asked, *statement.body[certain:]]
    tree.body = _asked(tree.body, questions, 1)
    return AskedTest(text=ast.unparse(ast.fix_missing_locations(tree)), questions=tuple(questions))


@lru_cache(maxsize=1024)
def what_is_not_run(test: str) -> str:
    """Say why a test would hold for any program, or for none, since nobody runs its checks.

    Empty for a test that does something of its own, or cannot be read.
    """
    tree = _parsed(test)
    if tree is None:
        return ""
    alone = [node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)]
    if any(isinstance(value, ast.Call) and _is_unittest(value.func) for value in alone):
        return f"unittest.main() ends it, or tells nothing: write {_UNITTEST} in its place"
    if not _only_defines(tree):
        return ""
    defined = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
    if defined:
        names = ", ".join(defined[:3])
        return f"it defines {names} and calls nothing: write {defined[0]}(...) behind it"
    classes = any(isinstance(node, ast.ClassDef) for node in tree.body)
    return f"it asserts nothing{f': write {_UNITTEST} behind it' if classes else ''}"


@lru_cache(maxsize=1024)
def called_as_by_pytest(test: str) -> str:
    """Return a test with calls of the functions that pytest would call, if it calls nothing itself.

    Those are plain functions without arguments whose names begin with ``test``. What they import
    of a module ``solution``, where data sets have the program, is what the program defines.
    """
    tree = _parsed(test)
    if tree is None or not _only_defines(tree):
        return test
    tests = [node for node in tree.body if _is_test(node)]
    if not all(isinstance(node, ast.FunctionDef) and _is_plain_call(node) for node in tests):
        return test
    names = dict.fromkeys(node.name for node in tests if isinstance(node, ast.FunctionDef))
    body = [part for node in tree.body for part in _without_solution(node)]
    lines = [ast.unparse(node) for node in body]
    return "\n".join([*lines, *(f"{name}()" for name in names)]) if names else test


def _parsed(test: str) -> ast.Module | None:
    try:
        return ast.parse(test)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _only_defines(tree: ast.Module) -> bool:
    return all(isinstance(node, _DEFINING) or _is_constant(node) for node in tree.body)


def _is_test(node: ast.stmt) -> bool:
    if isinstance(node, ast.ClassDef):
        return node.name.startswith("Test")
    is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    return is_function and node.name.startswith("test")


def _is_plain_call(function: ast.FunctionDef) -> bool:
    """Whether it is called without arguments, once, for what it does."""
    taken = function.args
    arguments = [*taken.posonlyargs, *taken.args, *taken.kwonlyargs, taken.vararg, taken.kwarg]
    return _is_plain(function) and not any(arguments)


def _is_plain(function: ast.FunctionDef) -> bool:
    """Whether a call runs what it says: it is not decorated, and no generator."""
    parts = ast.walk(function)
    is_generator = any(isinstance(part, ast.Yield | ast.YieldFrom) for part in parts)
    return not function.decorator_list and not is_generator


def _without_solution(node: ast.stmt) -> list[ast.stmt]:
    """Give names that are imported of the program to what has another name there."""
    if not isinstance(node, ast.ImportFrom) or node.module != "solution":
        return [node]
    renamed = [(alias.asname, alias.name) for alias in node.names if alias.asname]
    return [line for new, old in renamed for line in ast.parse(f"{new} = {old}").body]


def _is_unittest(called: ast.expr) -> bool:
    return ast.unparse(called) == "unittest.main"


def _is_constant(node: ast.stmt) -> bool:
    """Whether a statement only gives names to constants, or is a text for readers."""
    if not isinstance(node, ast.Assign | ast.AnnAssign | ast.Expr):
        return False
    return node.value is None or _plain(node.value)[1]


def _calls_of_functions(body: Sequence[ast.stmt]) -> Mapping[str, int]:
    """Return how often each plain function of a test is called in a line of its own."""
    defined = Counter(node.name for node in body if isinstance(node, ast.FunctionDef))
    plain = {
        node.name
        for node in body
        if isinstance(node, ast.FunctionDef) and defined[node.name] == 1 and _is_plain(node)
    }
    alone = [node.value for node in body if isinstance(node, ast.Expr)]
    called = [value.func for value in alone if isinstance(value, ast.Call)]
    names = Counter(name.id for name in called if isinstance(name, ast.Name))
    return {name: count for name, count in names.items() if name in plain}


def _certain(body: Sequence[ast.stmt]) -> int:
    """Count the statements of a function before the first that may leave it."""
    for number, statement in enumerate(body):
        if any(isinstance(part, ast.Return) for part in ast.walk(statement)):
            return number
    return len(body)


def _asked(body: Sequence[ast.stmt], questions: list[Question], times: int) -> list[ast.stmt]:
    asked: list[ast.stmt] = []
    for statement in body:
        if isinstance(statement, ast.Assert):
            for condition in _all_of(statement.test):
                value, question = _question(condition, times)
                asked.append(ast.copy_location(_answering(len(questions), value), statement))
                questions.append(question)
        else:
            asked.append(statement)
    return asked


def _all_of(condition: ast.expr) -> list[ast.expr]:
    if isinstance(condition, ast.BoolOp) and isinstance(condition.op, ast.And):
        return [part for value in condition.values for part in _all_of(value)]
    return [condition]


def _question(condition: ast.expr, times: int) -> tuple[ast.expr, Question]:
    """Return what to ask for, and what it has to be: the value if compared, else the truth."""
    if isinstance(condition, ast.Compare) and len(condition.ops) == 1:
        compare = _COMPARISONS.get(type(condition.ops[0]))
        is_identity = compare is operator.is_
        for is_first, known, value in (
            (False, condition.comparators[0], condition.left),
            (True, condition.left, condition.comparators[0]),
        ):
            expected, is_plain = _plain(known)
            if compare and is_plain and not (is_identity and not _is_single(expected)):
                return value, Question(
                    compare=compare, expected=expected, is_first=is_first, times=times
                )
    truth = ast.IfExp(test=condition, body=ast.Constant(True), orelse=ast.Constant(False))
    return truth, Question(compare=operator.is_, expected=True, is_first=False, times=times)


def _plain(node: ast.expr) -> tuple[Any, bool]:  # of any plain class
    try:
        return ast.literal_eval(node), True
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None, False


def _is_single(value: object) -> bool:
    return value is None or isinstance(value, bool)


def _answering(number: int, value: ast.expr) -> ast.stmt:
    called = ast.Name(id=_ANSWER, ctx=ast.Load())
    arguments = cast("list[ast.expr]", [ast.Constant(number), value])
    return ast.Expr(ast.Call(func=called, args=arguments, keywords=[]))
