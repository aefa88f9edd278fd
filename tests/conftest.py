"""How the suite is shared out over pytest's workers.

`make test` runs two. The tests of one file stay together, so that what a file starts (an engine, a
group of processes) is started once. All of `tests/e2e` is one chain: each of its runs keeps two
cores busy by itself, so two at a time would only slow each other; the other worker goes through
everything else beside it.
"""

from typing import Any

import pytest

_END_TO_END = "tests/e2e/"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options of tests that run a part of what they can."""
    parser.addoption(
        "--parallel-axes",
        choices=("ci", "all"),
        default="ci",
        help="layouts of test_parallel_axes: what CI runs, or every family under every layout",
    )
    parser.addoption(
        "--thorough", action="store_true", help="also tests marked thorough, which CI leaves out"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is thorough, unless it is asked for."""
    if config.getoption("--thorough"):
        return
    is_thorough = [item.get_closest_marker("thorough") is not None for item in items]
    left_out = [item for item, thorough in zip(items, is_thorough, strict=True) if thorough]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item, thorough in zip(items, is_thorough, strict=True) if not thorough]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> object:
    """Deal out whole files, and the folder of end-to-end tests as one."""
    from xdist.scheduler import LoadScopeScheduling

    class WholeFiles(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            path = nodeid.partition("::")[0]
            return _END_TO_END if path.startswith(_END_TO_END) else path

    return WholeFiles(config, log)
