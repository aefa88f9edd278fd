"""A function fits a screen and a module an idea; what does not is named here with its reason."""

import ast

_MAX_MODULE_LINES = 400
_MAX_FUNCTION_LINES = 60
_MAX_RECIPE_LINES = 40  # of code: what a user writes who adds an algorithm

# {path: reason} for a module, {"path::function": reason} for a function.
EXCEPTIONS: dict[str, str] = {
    "tests/contract/test_rollout_engines.py": "one contract suite, run for every engine",
    "tests/contract/test_weightsync_transports.py": "one contract suite, run for every transport",
    "tests/support/hung_policies.py": "one world: what its processes do refers to each other",
    "tests/unit/core/test_core_config.py": "tables of configurations and the errors they give",
}


def _functions(tree: ast.Module) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return [node for node in ast.walk(tree) if isinstance(node, kinds)]


def _too_long(sources) -> dict[str, str]:
    found = {}
    for source in sources:
        lines = source.text.count("\n")
        if lines > _MAX_MODULE_LINES:
            found[source.path] = (
                f"{lines} lines; split it by idea, or give its reason in EXCEPTIONS"
            )
        for function in _functions(source.tree):
            lines = (function.end_lineno or function.lineno) - function.lineno + 1
            if lines > _MAX_FUNCTION_LINES:
                found[f"{source.path}::{function.name}"] = (
                    f"{lines} lines (line {function.lineno}); a function fits a screen of "
                    f"{_MAX_FUNCTION_LINES} lines"
                )
    return found


def test_modules_and_functions_stay_within_their_caps(sources):
    found = {where: why for where, why in _too_long(sources).items() if where not in EXCEPTIONS}
    assert not found, "\n".join(f"{where}: {why}" for where, why in found.items())


def test_no_exception_has_outlived_its_reason(sources):
    assert not EXCEPTIONS.keys() - _too_long(sources).keys(), "delete these from EXCEPTIONS"


def _lines_of_code(source) -> int:
    """Count lines that are neither empty, nor a comment, nor of a docstring."""
    words: set[int] = set()
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            words |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    lines = enumerate(source.text.splitlines(), start=1)
    return sum(1 for n, line in lines if line.split("#")[0].strip() and n not in words)


def test_an_algorithm_is_a_file_of_forty_lines(sources):
    recipes = [
        each
        for each in sources
        if "/cosmos_algos/recipes/" in each.path and not each.path.endswith("__init__.py")
    ]
    assert len(recipes) >= 20
    found = {each.path: _lines_of_code(each) for each in recipes}
    assert max(found.values()) <= _MAX_RECIPE_LINES, found
