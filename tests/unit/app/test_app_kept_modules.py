"""Python's collector around the imports of a process, seen in processes of their own."""

import gc
import subprocess
import sys

import pytest

from cosmos_app.guarded import guarded

_STARTS = """
import gc
from cosmos_app.__main__ import start
try:
    start()
except SystemExit:
    print("collects" if gc.isenabled() else "imports")
"""
_RUNS = """
import gc
from cosmos_app.guarded import guarded
from cosmos_app.kept_modules import begin_imports
begin_imports()
kept = [[] for _ in range(1000)]
guarded(lambda: print(gc.isenabled(), gc.get_freeze_count() > len(kept)))
"""


def printed(*command: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, timeout=120, check=True
    )
    return done.stdout.splitlines()


def test_nothing_is_collected_until_a_command_has_its_modules() -> None:
    assert printed("-c", _STARTS, "--help")[-1] == "imports"


def test_what_is_there_when_a_command_begins_is_left_alone() -> None:
    assert printed("-c", _RUNS) == ["True True"]


def test_the_collector_of_somebody_elses_process_is_not_touched() -> None:
    before = gc.get_freeze_count()
    new = [[] for _ in range(1000)]
    with pytest.raises(SystemExit):
        guarded(lambda: 0)
    assert gc.isenabled()
    assert gc.get_freeze_count() < before + len(new)
