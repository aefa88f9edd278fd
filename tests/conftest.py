"""How the suite is shared out over pytest's workers, and what it says of tests that did not run.

`make test` runs two. The tests of one file stay together, so that what a file starts (an engine, a
group of processes) is started once. All of `tests/e2e` is one chain: each of its runs keeps two
cores busy by itself, so two at a time would only slow each other; the other worker goes through
everything else beside it.

A test that lacks something is skipped, and the closing lines say what would have it run. Under
``--require`` a skip for want of what is named there is a failure (decision 0398).
"""

import gc
from collections import Counter
from collections.abc import Generator
from typing import Any

import pytest
from capabilities import refusal, required_by, summary

_END_TO_END = "tests/e2e/"
_REQUIRED = pytest.StashKey[frozenset[str]]()
_LEFT_OUT = pytest.StashKey[Counter[str]]()
_HOW = {"gpu": "make test-gpu", "thorough": "--thorough"}


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
    parser.addoption(
        "--require",
        default="",
        metavar="NAMES",
        help="fail where one of these is missing, instead of skipping what waits for it: "
        "names of tests/support/capabilities.py with commas between, or all",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Read what is required; what cannot be collected then is no reason not to run the rest."""
    config.stash[_REQUIRED] = required_by(config.getoption("--require"))
    config.stash[_LEFT_OUT] = Counter()
    if config.stash[_REQUIRED]:
        config.option.continue_on_collection_errors = True


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection() -> Generator[None, object, object]:
    """Look for no garbage while a million objects are made by imports: a fifth of their time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is thorough, unless it is asked for."""
    if config.getoption("--thorough"):
        return
    is_thorough = [item.get_closest_marker("thorough") is not None for item in items]
    left_out = [item for item, thorough in zip(items, is_thorough, strict=True) if thorough]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item, thorough in zip(items, is_thorough, strict=True) if not thorough]


def pytest_deselected(items: list[pytest.Item]) -> None:
    """Count what is left out by its marker."""
    for item in items:
        markers = [name for name in _HOW if item.get_closest_marker(name) is not None]
        item.config.stash[_LEFT_OUT].update(markers[:1])


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Make an error of a module that lacks what is required."""
    report = yield
    _refuse(report, collector.config)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Make a failure of a test that lacks what is required."""
    report = yield
    if not hasattr(report, "wasxfail"):
        _refuse(report, item.config)
    return report


def _refuse(report: pytest.CollectReport | pytest.TestReport, config: pytest.Config) -> None:
    if report.skipped and (why := refusal(_reason(report), config.stash[_REQUIRED])):
        report.outcome = "failed"
        report.longrepr = f"{report.nodeid}: {why}"


def _reason(report: pytest.CollectReport | pytest.TestReport) -> str:
    return report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Have a worker tell what it left out."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["left_out"] = dict(session.config.stash[_LEFT_OUT])


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    """Take what a worker left out; each leaves out the same."""
    told = getattr(node, "workeroutput", {}).get("left_out")
    if told is not None:
        node.config.stash[_LEFT_OUT] = Counter(told)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Say what was not tested, and what would have it tested."""
    skipped = terminalreporter.stats.get("skipped", [])
    lines = summary(_reason(report) for report in skipped)
    for marker, count in sorted(config.stash[_LEFT_OUT].items()):
        lines.append(f"{marker}: {count} left out: {_HOW[marker]}")
    if lines:
        terminalreporter.section("not tested here")
        for line in lines:
            terminalreporter.write_line(line)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> object:
    """Deal out whole files, and the folder of end-to-end tests as one."""
    from xdist.scheduler import LoadScopeScheduling

    class WholeFiles(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            path = nodeid.partition("::")[0]
            return _END_TO_END if path.startswith(_END_TO_END) else path

    return WholeFiles(config, log)
