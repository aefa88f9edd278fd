"""Functions that a recipe names are looked for before anything starts, and nothing of them runs."""

import pytest

from cosmos_rollout import UserCodeError, find_callable

CODE = """
raise SystemExit("this file was run")

import math
from statistics import mean as average

def plain(sample): ...
async def later(sample): ...
class Callable: ...
if math:
    chosen = plain
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(CODE)
    return path


@pytest.mark.parametrize("name", ["plain", "later", "Callable", "chosen", "average"])
def test_what_a_file_binds_is_found(file, name):
    find_callable(f"{file}:{name}")


@pytest.mark.parametrize("more", ["from elsewhere import *", "def __getattr__(name): ..."])
def test_what_a_file_may_have_is_let_pass(file, more):
    file.write_text(more)
    find_callable(f"{file}:anything")


@pytest.mark.parametrize(
    ("reference", "words"),
    [
        ("{file}:plane", "has no function plane; it has plain, later, Callable$"),
        ("{file}.py:plain", r"there is no file .*mine\.py\.py"),
        ("no_such_module.part:f", "there is no module no_such_module$"),
    ],
)
def test_what_is_not_there_is_named(file, reference, words):
    with pytest.raises(UserCodeError, match=words):
        find_callable(reference.format(file=file))


def test_a_file_that_is_no_python_is_named_with_its_line(file):
    file.write_text("def f(:\n")
    with pytest.raises(UserCodeError, match=r"mine\.py is not Python: .*line 1"):
        find_callable(f"{file}:f")


def test_modules_are_found_where_a_run_starts_and_where_python_looks(file, monkeypatch):
    monkeypatch.chdir(file.parent)
    find_callable("mine:plain")
    find_callable("json:dumps")
