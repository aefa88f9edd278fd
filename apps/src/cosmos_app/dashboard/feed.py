"""Where a dashboard's facts come from: the run's files, and its controller's status in Redis.

It only reads, and it never waits long: a look at the files is bounded, and a Redis that is away is
a sentence on the page.
"""

import asyncio
import contextlib
import json
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cosmos_app.control_files import read_address
from cosmos_app.dashboard.history import History
from cosmos_app.dashboard.tail import Tail
from cosmos_app.dashboard.totals import Totals
from cosmos_app.errors import RunError
from cosmos_app.event_log import ROUTINE, parse_events
from cosmos_app.shown_samples import ShownSample, parse_shown_sample
from cosmos_core.bus import Bus, BusError
from cosmos_core.metrics import MetricsFormatError, decode_record
from cosmos_core.rundir import RunDirectory

_LOOK_EVERY_S = 0.5
_BREATH_S = 0.01
_REDIS_EVERY_S = 2.0
_PATIENCE_S = 1.0
_LOOKS_AT_ONCE = 8
_MOST_EVENTS = 1000
_MOST_SAMPLES = 40


class RunFeed:
    """Follows a run, live or recorded.

    Attributes:
        run: its directory.
        history: its measurements.
        events: the newest things that happened, oldest first.
        milestones: the same without what happens with every group and step.
        samples: the newest texts, oldest first.
        status: what the controller last said; empty for a run that is over.
        report: the report of a run that is over; empty before.
        totals: sums of the books that only grow.
        problem: why there is no status; empty while there is one.
        num_steps: steps that the recipe wants; 0 if it does not say.
        num_bad_lines: lines of metrics that are none.
        revision: grows with everything new.
    """

    def __init__(self, run: RunDirectory) -> None:
        """Nothing is read yet."""
        self.run = run
        self.history = History()
        self.events: deque[Mapping[str, Any]] = deque(maxlen=_MOST_EVENTS)
        self.milestones: deque[Mapping[str, Any]] = deque(maxlen=_MOST_EVENTS)
        self.samples: deque[ShownSample] = deque(maxlen=_MOST_SAMPLES)
        self.status: Mapping[str, Any] = {}
        self.report: Mapping[str, Any] = {}
        self.totals = Totals()
        self.problem = ""
        self.num_steps = _planned_steps(run)
        self.num_bad_lines = 0
        self.revision = 0
        self._metrics = Tail(run.metrics)
        self._log = Tail(run.path / "events.jsonl")
        self._texts = dict[Path, Tail]()
        self._bus: Bus | None = None
        self._asked_s = float("-inf")

    async def follow(self) -> None:
        """Look again and again, until cancelled."""
        try:
            while True:
                is_behind = await self.look()
                await asyncio.sleep(_BREATH_S if is_behind else _LOOK_EVERY_S)
        finally:
            await self._disconnect()

    async def look(self) -> bool:
        """Take in what is new, or a part of it; tell whether there is more."""
        is_behind = False
        for _ in range(_LOOKS_AT_ONCE):
            is_behind = self._read_files()
            if not is_behind:
                break
            self.revision += 1
            await asyncio.sleep(0)
        self._read_report()
        await self._read_status()
        self.totals.take(self.books)
        return is_behind

    @property
    def books(self) -> Mapping[str, Any]:
        """Groups issued, consumed, dropped by reason, in flight by stage; empty if unknown."""
        return self.status.get("books") or self.report.get("books", {})

    # ---------------------------------------------------------------- files

    def _read_files(self) -> bool:
        lines = self._metrics.lines()
        for line in lines:
            try:
                self.history.take([decode_record(line, str(self._metrics.path))])
            except MetricsFormatError:
                self.num_bad_lines += 1
        told = self._log.lines()
        events = parse_events(told)
        self.events.extend(events)
        self.milestones.extend(event for event in events if event["type"] not in ROUTINE)
        return bool(lines or told) | self._read_samples()

    def _read_samples(self) -> bool:
        for path in sorted((self.run.path / "samples").glob("shown-*.jsonl")):
            self._texts.setdefault(path, Tail(path))
        lines = [line for tail in self._texts.values() for line in tail.lines()]
        found = [sample for sample in map(parse_shown_sample, lines) if sample is not None]
        self.samples.extend(sorted(found, key=lambda sample: sample.time_s))
        return bool(lines)

    def _read_report(self) -> None:
        if self.report and self._has_gone_on():
            self.report = {}
            self.revision += 1
        if self.report or self.status.get("finished") or not self.run.report.exists():
            return
        with contextlib.suppress(ValueError, OSError):
            self.report = json.loads(self.run.report.read_text())
            if self._has_gone_on():
                self.report = {}
            else:
                self.revision += 1

    def _has_gone_on(self) -> bool:
        """Whether the report is of an earlier start, whose steps this one has left behind.

        A copy of a run has its files in any order, so that their times are not enough.
        """
        newest = self.history.curves["reward"].newest
        with contextlib.suppress(OSError):
            started_s = (self.run.path / "namespace").stat().st_mtime
            if self.run.report.stat().st_mtime < started_s:
                return newest is not None and newest.step >= self.report.get("steps", 0)
        return False

    # ---------------------------------------------------------------- Redis

    async def _read_status(self) -> None:
        now = time.monotonic()
        if self._bus is None and now - self._asked_s < _REDIS_EVERY_S:
            return
        self._asked_s = now
        try:
            bus = await self._connected()
            status = await bus.call(lambda c: c.get(bus.keys.status), patience_s=_PATIENCE_S)
        except (BusError, RunError) as error:
            await self._disconnect()
            self._note_problem(str(error))
            return
        found: dict[str, Any] = json.loads(status) if status else {}
        if found != self.status:
            self.status = found
            self.revision += 1
        self._note_problem("" if found else "the controller has not said anything yet")

    async def _connected(self) -> Bus:
        if self._bus is None:
            url, namespace = read_address(self.run)
            self._bus = await Bus.connect(
                url, namespace, connect_s=_PATIENCE_S, patience_s=_PATIENCE_S
            )
        return self._bus

    async def _disconnect(self) -> None:
        bus, self._bus = self._bus, None
        if bus is not None:
            await bus.close()

    def _note_problem(self, problem: str) -> None:
        if problem != self.problem:
            self.problem = problem
            self.revision += 1


def _planned_steps(run: RunDirectory) -> int:
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        return int(json.loads(run.config.read_text())["trainer"]["steps"])
    return 0
