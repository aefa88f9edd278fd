"""What the page of a world model's run shows, as plain values: the answers of its HTTP API."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from cosmos_app.wfm.dashboard.feed import WorldModelFeed
from cosmos_app.wfm.dashboard.galleries import IndexedSample

_FIRST = ("reward", "validation/reward", "loss")
"""Names of the curves that come first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorldModelRunView:
    """How the run stands.

    Attributes:
        name: of its directory.
        state: ``stopped`` if it is recorded and did not take all of its steps.
        message: one sentence.
        step: steps done.
        num_steps: steps in all; 0 if unknown.
        figures: of the newest step.
    """

    name: str
    state: Literal["running", "finished", "stopped"]
    message: str
    step: int
    num_steps: int
    figures: Mapping[str, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class StepsView:
    """One curve: values by step."""

    name: str
    steps: Sequence[int]
    values: Sequence[float]


@dataclass(frozen=True, kw_only=True, slots=True)
class ValidationView:
    """The samples that were drawn after a step."""

    step: int
    samples: Sequence[IndexedSample]


@dataclass(frozen=True, kw_only=True, slots=True)
class WorldModelPageView:
    """All of the page but the gallery, which is asked for when ``gallery_revision`` has grown."""

    revision: int
    gallery_revision: int
    run: WorldModelRunView
    curves: Sequence[StepsView]


def world_model_run_view(feed: WorldModelFeed) -> WorldModelRunView:
    """Return how the run stands."""
    is_whole = 0 < feed.num_steps <= feed.step
    state = "finished" if is_whole and not feed.is_live else "running"
    if not (is_whole or feed.is_live):
        state = "stopped"
    bad = [(feed.num_bad_lines, "lines of metrics.jsonl"), (feed.galleries.num_bad, "indices")]
    parts = [f"{number} {what} cannot be read" for number, what in bad if number]
    if state == "stopped":
        parts.insert(0, "as recorded so far; the run has not taken all of its steps")
    return WorldModelRunView(
        name=feed.run.name,
        state=state,
        message="; ".join(parts),
        step=feed.step,
        num_steps=feed.num_steps,
        figures=feed.latest,
    )


def step_curves(feed: WorldModelFeed) -> list[StepsView]:
    """Return every curve: rewards and the loss first, then by name."""
    found: dict[str, StepsView] = {}
    for name, curve in feed.curves.items():
        points = curve.points()
        steps, values = [p.step for p in points], [p.value for p in points]
        if points:
            found[name] = StepsView(name=name, steps=steps, values=values)
    first = [name for name in _FIRST if name in found]
    return [found[name] for name in [*first, *sorted(found.keys() - set(first))]]


def world_model_page_view(feed: WorldModelFeed) -> WorldModelPageView:
    """Return all of the page but its gallery."""
    return WorldModelPageView(
        revision=feed.revision,
        gallery_revision=feed.gallery_revision,
        run=world_model_run_view(feed),
        curves=step_curves(feed),
    )


def gallery_view(feed: WorldModelFeed) -> list[ValidationView]:
    """Return the samples of every validation, in the order of steps."""
    return [
        ValidationView(step=step, samples=samples)
        for step, samples in feed.galleries.by_step().items()
    ]
