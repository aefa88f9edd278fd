"""Where the dashboard of a world model's run has its facts from: what the run writes."""

import asyncio
import math
from collections.abc import Mapping

from cosmos_app.dashboard.history import Curve, Point
from cosmos_app.dashboard.tail import Tail
from cosmos_app.wfm.dashboard.galleries import Galleries
from cosmos_app.wfm.dashboard.recorded import planned_steps, read_figures
from cosmos_core.rundir import RunDirectory

_LOOK_EVERY_S = 1.0
_BREATH_S = 0.01
_MOST_CURVES = 40


class WorldModelFeed:
    """Follows a run of a world model, live or recorded.

    Attributes:
        run: its directory.
        is_live: whether the run itself had this feed started.
        num_steps: steps that the recipe wants; 0 if it does not say.
        step: steps done.
        latest: the figures of the newest step.
        curves: each figure by step, at most 40 of them.
        galleries: the samples of its validations.
        num_bad_lines: lines of metrics that are none.
        revision: grows with everything new.
        gallery_revision: grows with new samples.
    """

    def __init__(self, run: RunDirectory, *, is_live: bool) -> None:
        """Nothing is read yet."""
        self.run = run
        self.is_live = is_live
        self.num_steps = planned_steps(run)
        self.step = 0
        self.latest: Mapping[str, float] = {}
        self.curves = dict[str, Curve]()
        self.galleries = Galleries(run.path)
        self.num_bad_lines = 0
        self.revision = 0
        self.gallery_revision = 0
        self._metrics = Tail(run.metrics)

    async def follow(self) -> None:
        """Look again and again, until cancelled."""
        while True:
            is_behind = await self.look()
            await asyncio.sleep(_BREATH_S if is_behind else _LOOK_EVERY_S)

    async def look(self) -> bool:
        """Take in what is new, or a part of it; tell whether there is more."""
        lines = self._metrics.lines()
        for line in lines:
            self._take(line)
        if await asyncio.to_thread(self.galleries.look):
            self.gallery_revision += 1
            self.revision += 1
        if lines:
            self.revision += 1
        return bool(lines)

    def _take(self, line: bytes) -> None:
        figures = read_figures(line)
        if figures is None:
            self.num_bad_lines += 1
            return
        step, values = figures
        is_more = step == self.step and not values.keys() & self.latest.keys()
        if step <= self.step and not is_more:  # the run goes on from before this step
            for curve in self.curves.values():
                curve.drop_from(step)
        self.latest = {**self.latest, **values} if is_more else values
        self.step = step
        for name, value in values.items():
            if name in self.curves or len(self.curves) < _MOST_CURVES:
                self.curves.setdefault(name, Curve()).add(Point(math.nan, step, value))
