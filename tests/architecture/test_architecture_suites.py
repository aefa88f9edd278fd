"""No test is left out of `make test`, whose folders are named one by one."""

import ast
import tomllib


def test_every_folder_with_tests_is_run(root):
    settings = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
    named = [root / path for path in settings["tool"]["pytest"]["ini_options"]["testpaths"]]
    left_out = [
        str(path.relative_to(root))
        for path in sorted((root / "tests").rglob("test_*.py"))
        if not any(path.is_relative_to(folder) for folder in named)
    ]
    assert not left_out, "\n".join(left_out)


def test_a_skip_goes_by_the_name_of_what_is_missing(root):
    """`importorskip` names it by itself, unless it is given words of its own."""
    ours = ("pytest.skip", "pytest.mark.skip", "pytest.mark.skipif", "unittest.skip")
    named = root / "tests" / "support" / "capabilities.py"
    found = [
        f"{path.relative_to(root)}:{node.lineno}: take needs or skip_without of {named.name}"
        for path in sorted((root / "tests").rglob("*.py"))
        if path != named
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if (isinstance(node, ast.Attribute) and ast.unparse(node) in ours)
        or (isinstance(node, ast.Call) and _has_own_reason(node))
    ]
    assert not found, "\n".join(found)


def _has_own_reason(call):
    is_import = ast.unparse(call.func).endswith("importorskip")
    return is_import and any(keyword.arg == "reason" for keyword in call.keywords)
