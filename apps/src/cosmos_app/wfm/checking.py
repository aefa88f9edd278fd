"""The five-point checklist of a pipeline, for people and for programs."""

from dataclasses import asdict
from pathlib import Path

import click

from cosmos_app.output import print_json
from cosmos_wfm import CheckedPoint, check_model

NUM_POINTS = 5


def check_pipeline(model: Path, *, adapter: str, as_json: bool) -> int:
    """Print the points; return 0 if all five passed, else 1."""
    points = check_model(model, adapter=adapter)
    if as_json:
        print_json([asdict(point) for point in points])
    else:
        click.echo(report(model, points))
    return 0 if len(points) == NUM_POINTS and all(point.passed for point in points) else 1


def report(model: Path, points: list[CheckedPoint]) -> str:
    """Return one line per point, and what was not asked as an earlier one failed."""
    lines = [f"{model}"]
    for number, point in enumerate(points, start=1):
        mark = "ok  " if point.passed else "FAIL"
        lines.append(f"  {number}. {mark} {point.name}: {point.detail}")
    if len(points) < NUM_POINTS:
        lines.append(f"  points {len(points) + 1} to {NUM_POINTS} build on that one: not asked")
    return "\n".join(lines)
