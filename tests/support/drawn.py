"""What the curves and lanes of a dashboard's page are, and what they are to be."""

import re
from collections.abc import Sequence
from typing import Any

from pages import texts

Line = list[tuple[float, float]]
"""Points of a curve: what was measured, or pixels from the left and from the top."""


def points_drawn(page: Any, figure: str) -> list[Line]:
    """Return the points of each line of a figure, and behind them all of its dots."""
    svg = f"document.querySelector('#c-{figure}')"
    paths = page.execute_script(
        f"return [...{svg}.querySelectorAll('path')].map((e) => e.getAttribute('d'))"
    )
    dots = page.execute_script(
        f"return [...{svg}.querySelectorAll('circle')]"
        ".map((e) => [e.cx.baseVal.value, e.cy.baseVal.value])"
    )
    lines = [[(float(x), float(y)) for x, y in re.findall(r"[ML](\S+) (\S+?)(?=[ML]|$)", path)]
             for path in paths]  # fmt: skip
    return [*lines, *([[(x, y) for x, y in dots]] if dots else [])]


def points_of(page: Any, figure: str, measured: Sequence[Line]) -> list[Line]:
    """Return where the points of curves belong, which share a scale that has zero on it."""
    width, height = page.execute_script(
        f"const e = document.querySelector('#c-{figure}'); return [e.clientWidth, e.clientHeight]"
    )
    xs = [x for line in measured for x, _ in line]
    left, right = min(xs), max(xs)
    ys = [y for line in measured for _, y in line]
    low = min(0, *ys)
    most = max(low + 1e-9, *ys)
    # a rim to the left, right and below, and room for the most above
    wide, tall = (width - 4) / (right - left), (height - 14) / (most - low)
    return [
        [(2 + wide * (x - left), height - 3 - tall * (y - low)) for x, y in line]
        for line in measured
    ]


def lane_classes(page: Any) -> dict[str, set[str]]:
    """Return what is drawn in the lane of each replica: kinds of work, and marks of loads."""
    found = page.execute_script(
        "return [...document.querySelectorAll('#timeline svg[data-replica]')].map((e) => "
        "[e.dataset.replica, [...e.querySelectorAll('rect')].map((r) => r.getAttribute('class'))])"
    )
    return {name: set(classes) for name, classes in found}


def lane_shares(page: Any) -> dict[str, dict[str, int]]:
    """Return the per cent of each kind of work, and of idling, that each lane is said to have."""
    labels = page.execute_script(
        "return [...document.querySelectorAll('#timeline svg[data-replica]')]"
        ".map((e) => e.getAttribute('aria-label'))"
    )
    return {
        label.partition(":")[0]: {k: int(v) for k, v in re.findall(r"(\w+) (\d+)%", label)}
        for label in labels
    }


def row_of(page: Any, replica: str) -> str:
    """Return what is said of a replica, behind its name; nothing if it is not there."""
    rows = [row for row in texts(page, "#replica-rows tr") if row.startswith(replica)]
    return rows[0].removeprefix(replica) if rows else ""
