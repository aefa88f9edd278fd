"""What is skipped, where a machine has to have what it waits for."""

import os
import shutil
import subprocess
import sys

import pytest

TESTS = {
    "test_module.py": """
        import pytest
        pytest.importorskip("no_such_module")
        def test_never_seen(): ...
    """,
    "test_tests.py": """
        import pytest
        from capabilities import needs, skip_without
        def test_is_there(): ...
        @needs("browser", False)
        def test_of_a_page(): ...
        def test_of_a_processor():
            skip_without("amx", "found another")
        @pytest.mark.skip(reason="nobody knows")
        def test_without_a_name(): ...
        @pytest.mark.xfail(reason="fails", strict=True)
        def test_that_is_known_to_fail():
            assert False
    """,
}


@pytest.fixture
def suite(root, tmp_path):
    """Return a function that runs a small suite under this one's rules: status and output."""
    shutil.copy(root / "tests" / "conftest.py", tmp_path)
    for name, text in TESTS.items():
        lines = text.splitlines()
        (tmp_path / name).write_text("\n".join(line[8:] for line in lines))
    (tmp_path / "pytest.ini").write_text(
        f"[pytest]\npythonpath = {root / 'tests' / 'support'}\nmarkers =\n  gpu\n  thorough\n"
    )

    def run(*options):
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-p", "xdist.plugin", "-q", *options],
            cwd=tmp_path,
            env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        return done.returncode, done.stdout + done.stderr

    return run


def test_without_being_asked_all_is_skipped_with_what_would_help(suite):
    status, said = suite()
    assert status == 0, said
    assert "1 passed, 4 skipped, 1 xfailed" in said
    assert "browser: 1 skipped, waiting for Chromium" in said
    assert "scripts/install_browser.sh" in said
    assert "packages: 1 skipped, waiting for what the workspace installs: make setup" in said
    assert "amx: 1 skipped" in said


@pytest.mark.parametrize("workers", ["0", "2"])
def test_what_is_required_fails_and_the_rest_runs(suite, workers):
    status, said = suite("-n", workers, "--require", "all")
    assert status == 1, said
    assert "1 passed, 1 skipped, 1 xfailed, 3 errors" in said
    assert "--require browser, which is not there: browser: waits for Chromium" in said
    assert "--require packages, which is not there: could not import 'no_such_module'" in said
    assert "skipped for a reason that tests/support/capabilities.py does not know" in said
    assert "amx: 1 skipped" in said


def test_one_is_required_by_its_name(suite):
    status, said = suite("--require", "amx,browser", "test_tests.py")
    assert status == 1, said
    assert "1 failed, 1 passed, 1 xfailed, 2 errors" in said
    assert "waits for a processor with AMX, for kernels of vLLM (found another)" in said


def test_a_name_that_there_is_not_is_refused_with_those_that_there_are(suite):
    status, said = suite("--require", "chromium")
    assert status == 4, said
    assert "--require: no chromium; there are all, packages, " in said
