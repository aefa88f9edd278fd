"""No test is left out of `make test`, whose folders are named one by one."""

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
