"""How the suite is shared out over pytest's workers.

`make test` runs two. The tests of one file stay together, so that what a file starts (an engine, a
group of processes) is started once. All of `tests/e2e` is one chain: each of its runs keeps two
cores busy by itself, so two at a time would only slow each other; the other worker goes through
everything else beside it.
"""

from pathlib import Path

import pytest

_TESTS = Path(__file__).parent


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options of tests that run a part of what they can."""
    parser.addoption(
        "--parallel-axes",
        choices=("ci", "all"),
        default="ci",
        help="layouts of test_parallel_axes: what CI runs, or every family under every layout",
    )


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put each test into the group that one worker runs in order."""
    if not config.pluginmanager.hasplugin("xdist"):
        return
    for item in items:
        place = item.path.relative_to(_TESTS)
        group = "e2e" if place.parts[0] == "e2e" else str(place)
        item.add_marker(pytest.mark.xdist_group(group))
