"""Of which scripts it is certain that processes which import them would run them again."""

import sys
from types import ModuleType

import pytest

from cosmos_rollout.engines.vllm_starting import check_script
from cosmos_rollout.errors import EngineStartError
from cosmos_rollout.script_guard import lacking_guard


@pytest.fixture
def started(tmp_path, monkeypatch):
    """Have this process be one that runs a script of such a text."""

    def start(source: str, name: str = "train.py") -> None:
        script = tmp_path / name
        script.write_text(source)
        main = ModuleType("__main__")
        main.__file__ = str(script)
        monkeypatch.setitem(sys.modules, "__main__", main)

    return start


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
def test_a_script_that_cannot_know_that_it_is_imported_is_told(started, source, name, is_told):
    started(source, name)
    assert ("train" in lacking_guard()) is is_told


def test_what_is_no_file_is_left_to_python(monkeypatch):
    monkeypatch.setitem(sys.modules, "__main__", ModuleType("__main__"))  # a notebook, python -c
    assert lacking_guard() == ""
    main = ModuleType("__main__")
    main.__file__ = "<stdin>"
    monkeypatch.setitem(sys.modules, "__main__", main)
    assert lacking_guard() == ""


def test_vllm_is_not_started_from_such_a_script_unless_it_is_forked(started):
    started("run()\n")
    check_script("fork")
    with pytest.raises(EngineStartError, match=r'train\.py.* under `if __name__ == "__main__":`'):
        check_script("spawn")
