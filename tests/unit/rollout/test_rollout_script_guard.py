"""Of which scripts it is certain that processes which import them would run them again."""

from pathlib import Path
from types import ModuleType

import pytest

from cosmos_rollout.engines.vllm_starting import check_script
from cosmos_rollout.errors import EngineStartError
from cosmos_rollout.script_guard import lacking_guard


def running(script: Path | str) -> ModuleType:
    """Return what a script runs in."""
    main = ModuleType("__main__")
    main.__file__ = str(script)
    return main


@pytest.mark.parametrize(
    ("source", "name", "is_told"),
    [
        ("run()\n", "train.py", True),
        ("def main():\n    run()\n\nmain()\n", "train", True),  # without a suffix
        ('if __name__ == "__main__":\n    run()\n', "train.py", False),
        ("if __name__ != '__mp_main__':\n    run()\n", "train.py", False),
        ("if not multiprocessing.parent_process():\n    run()\n", "train.py", False),
        ("run()\n", "__main__.py", False),  # python -m package, which is not imported again
    ],
)
def test_a_script_that_cannot_know_that_it_is_imported_is_told(tmp_path, source, name, is_told):
    script = tmp_path / name
    script.write_text(source)
    assert ("train" in lacking_guard(running(script))) is is_told


def test_what_is_no_file_is_left_to_python():
    assert lacking_guard(ModuleType("__main__")) == ""  # a notebook, python -c
    assert lacking_guard(running("<stdin>")) == ""


def test_vllm_is_not_started_from_such_a_script_unless_it_is_forked(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("run()\n")
    main = running(script)
    check_script("fork", main)
    with pytest.raises(EngineStartError, match=r'train\.py.* under `if __name__ == "__main__":`'):
        check_script("spawn", main)
