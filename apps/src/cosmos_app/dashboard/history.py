"""What a dashboard remembers of a run's measurements: curves and timelines of bounded size.

A curve keeps every measurement until it is full, then every second one, and so on: its memory is
bounded and its shape stays. A timeline keeps the newest spans of each replica. Of very many
replicas the first are kept, until they have been silent for long and others want their place.
"""

import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from cosmos_core.metrics import MetricRecord

_MOST_POINTS = 600
_MOST_SPANS = 2000
_MOST_REPLICAS = 64
_MOST_STALLS = 400
_SPEAKS_FOR_S = 10.0
_FORGOTTEN_S = 900.0

# Curve: role and value of the record it comes from.
CURVES: Mapping[str, tuple[str, str]] = {
    "reward": ("controller", "reward"),
    "staleness_mean": ("controller", "staleness_mean"),
    "staleness_max": ("controller", "staleness_max"),
    "queue_waiting": ("controller", "queue_waiting"),
    "queue_generating": ("controller", "queue_generating"),
    "queue_ready": ("controller", "queue_ready"),
    "loss": ("policy", "loss"),
    "policy_idle": ("policy", "idle_share"),
    "rollout_idle": ("rollout", "idle_share"),
}
ROLLOUT_STATES: Mapping[str, str] = {
    "decoding_share": "generating",
    "waiting_for_environment_share": "environment",
    "waiting_for_rewards_share": "scoring",
    "paused_for_weights_share": "swapping",
    "gated_staleness_share": "withheld",
}


@dataclass(frozen=True, slots=True)
class Point:
    """One measurement: when (seconds since the epoch), at which step, and its value."""

    time_s: float
    step: int
    value: float


@dataclass(slots=True)
class Curve:
    """Measurements of one thing, at most ``most`` of them and the newest one always."""

    most: int = _MOST_POINTS
    _kept: list[Point] = field(default_factory=list[Point])
    _newest: Point | None = None
    _stride: int = 1
    _seen: int = 0

    def add(self, point: Point) -> None:
        """Take a measurement in; one that is not finite is none."""
        if not math.isfinite(point.value):
            return
        if self._seen % self._stride == 0:
            self._kept.append(point)
        self._seen += 1
        self._newest = point
        if len(self._kept) >= self.most:
            self._kept = self._kept[::2]
            self._stride *= 2

    def drop_from(self, step: int) -> None:
        """Let go of what was measured at a step or later, which is measured again."""
        self._kept = [point for point in self._kept if point.step < step]
        self._newest = self._kept[-1] if self._kept else None

    @property
    def newest(self) -> Point | None:
        """The measurement taken in last."""
        return self._newest

    def points(self) -> list[Point]:
        """Return what is kept, in order."""
        is_kept = not self._kept or self._kept[-1] is self._newest
        return list(self._kept) if is_kept or self._newest is None else [*self._kept, self._newest]


@dataclass(frozen=True, slots=True)
class Span:
    """What a replica did between two moments: the share of each state; the rest was idle."""

    start_s: float
    end_s: float
    shares: Mapping[str, float]

    def withheld(self, seconds: float) -> "Span":
        """Return it with so much of what was idle as withheld by admission, as far as there is."""
        share = min(seconds / (self.end_s - self.start_s), self.idle_share)
        known = self.shares.get("withheld", 0.0)
        return Span(self.start_s, self.end_s, {**self.shares, "withheld": known + share})

    @property
    def idle_share(self) -> float:
        """What is left to idling."""
        return max(0.0, 1.0 - sum(self.shares.values()))


@dataclass(frozen=True, slots=True)
class Stall:
    """One weight version arriving: how long it travelled, and how long generation stood still."""

    time_s: float
    version: int
    stall_s: float
    transfer_s: float


@dataclass(slots=True)
class Lane:
    """One replica on the timeline."""

    role: str
    spans: deque[Span] = field(default_factory=lambda: deque[Span](maxlen=_MOST_SPANS))
    stalls: deque[Stall] = field(default_factory=lambda: deque[Stall](maxlen=_MOST_STALLS))
    measured_s: float = 0.0
    seen_s: float = 0.0

    def take_step(self, end_s: float, values: Mapping[str, float]) -> None:
        """Take in what a policy did up to the end of a step; what is between was waited for."""
        parts = dict(policy_parts(values))
        start_s = end_s - sum(parts.values())
        for state, seconds in parts.items():
            first_s, start_s = max(start_s, self.measured_s), start_s + seconds
            if state and start_s > first_s:
                self.spans.append(Span(first_s, start_s, {state: 1.0}))
        self.measured_s = end_s

    def withhold(self, seconds: float) -> None:
        """Learn that for so long before the newest span an empty replica had a group withheld."""
        later: list[Span] = []
        while self.spans and seconds > 1e-3:
            span = self.spans.pop()
            later.append(span.withheld(seconds))
            if span.idle_share < 1e-3:
                break  # it was at work: nothing was withheld before that
            seconds -= span.idle_share * (span.end_s - span.start_s)
        self.spans.extend(reversed(later))


def policy_parts(values: Mapping[str, float]) -> Iterator[tuple[str, float]]:
    """Yield the parts of a policy's step in order, with their seconds; a wait has no name."""
    wait_s, validate_s = values.get("wait_s", 0.0), values.get("validate_s", 0.0)
    optim_s, publish_s = values.get("optim_s", 0.0), values.get("publish_s", 0.0)
    yield "saving", values.get("save_s", 0.0)
    yield "validating", validate_s
    yield "", wait_s - validate_s
    yield "training", values.get("train_s", 0.0) - optim_s
    yield "updating", optim_s
    yield "publishing", publish_s


class History:
    """Takes metric records in, in the order in which they were measured.

    Attributes:
        curves: by the names of `CURVES`, and ``tokens_per_s``, ``stall_ms``, ``samples_per_s``.
        lanes: by replica, at most 64 of them.
        latest: the newest values of each replica, at most 128 of them.
        num_stalls: weight loads so far, by replica.
        stalled_s: seconds that generation stood still for them, by replica.
        num_skipped: versions that were not published with their step, by replica.
        first_s: time of the first record; infinite before.
        last_s: time of the newest record; 0 before.
    """

    def __init__(self) -> None:
        self.curves: dict[str, Curve] = {name: Curve() for name in CURVES}
        self.curves |= {name: Curve() for name in ("tokens_per_s", "stall_ms", "samples_per_s")}
        self.lanes = dict[str, Lane]()
        self.latest = dict[str, MetricRecord]()
        self.num_stalls = dict[str, int]()
        self.stalled_s = dict[str, float]()
        self.num_skipped = dict[str, int]()
        self.first_s = math.inf
        self.last_s = 0.0
        self._rates = dict[str, tuple[float, float]]()
        self._stepped_s = math.nan
        self._num_samples = 0.0

    def take(self, records: Iterable[MetricRecord]) -> None:
        """Take records in."""
        for record in records:
            self.first_s = min(self.first_s, record.time_s)
            self.last_s = max(self.last_s, record.time_s)
            self._remember(record)
            for name, (role, value) in CURVES.items():
                if record.role == role and value in record.values:
                    self._add(name, record, record.values[value])
            if record.role == "policy":
                self._take_policy(record)
            elif record.role == "rollout":
                self._take_rollout(record)
            elif record.role == "controller":
                self._take_step(record)

    def _remember(self, record: MetricRecord) -> None:
        before = self.latest.get(record.replica)
        if before is None and len(self.latest) >= 2 * _MOST_REPLICAS:
            oldest = min(self.latest.values(), key=lambda known: known.time_s)
            if record.time_s - oldest.time_s < _FORGOTTEN_S:
                return
            self._forget(oldest.replica)
        values = {**before.values, **record.values} if before else record.values
        self.latest[record.replica] = MetricRecord(
            record.time_s, record.role, record.replica, record.step, values
        )

    def _add(self, name: str, record: MetricRecord, value: float) -> None:
        self.curves[name].add(Point(record.time_s, record.step, value))

    def _forget(self, replica: str) -> None:
        for known in (self.latest, self.num_stalls, self.stalled_s, self.num_skipped, self._rates):
            known.pop(replica, None)

    def _lane(self, record: MetricRecord) -> Lane | None:
        if record.replica not in self.lanes and len(self.lanes) >= _MOST_REPLICAS:
            oldest = min(self.lanes, key=lambda name: self.lanes[name].seen_s)
            if record.time_s - self.lanes[oldest].seen_s < _FORGOTTEN_S:
                return None
            del self.lanes[oldest]
        lane = self.lanes.setdefault(record.replica, Lane(record.role))
        lane.seen_s = record.time_s
        return lane

    def _take_policy(self, record: MetricRecord) -> None:
        lane = self._lane(record)
        if lane is not None and "train_s" in record.values:
            lane.take_step(record.time_s, record.values)
        self._num_samples = record.values.get("num_samples", self._num_samples)
        if skipped := int(record.values.get("publications_skipped", 0)):
            before = self.num_skipped.get(record.replica, 0)
            self.num_skipped[record.replica] = before + skipped

    def _take_step(self, record: MetricRecord) -> None:
        """Take a committed step in; how many samples it had, the policy replicas say."""
        if record.time_s > self._stepped_s and self._num_samples:
            rate = self._num_samples / (record.time_s - self._stepped_s)
            self._add("samples_per_s", record, rate)
        self._stepped_s = record.time_s

    def _take_rollout(self, record: MetricRecord) -> None:
        lane, values = self._lane(record), record.values
        if "stall_s" in values:
            self._take_stall(record, lane)
        if "decoding_share" not in values:
            return
        if lane is not None:
            lane.withhold(values.get("withheld_before_s", 0.0))
            start_s = max(lane.measured_s, record.time_s - _SPEAKS_FOR_S)
            shares = {
                state: values[name] for name, state in ROLLOUT_STATES.items() if values.get(name)
            }
            if lane.measured_s:
                lane.spans.append(Span(start_s, record.time_s, shares))
            lane.measured_s = record.time_s
        self._rates[record.replica] = (record.time_s, values["tokens_per_s"])
        self._rates = {
            name: told
            for name, told in self._rates.items()
            if record.time_s - told[0] < _SPEAKS_FOR_S
        }
        self._add("tokens_per_s", record, sum(rate for _, rate in self._rates.values()))

    def _take_stall(self, record: MetricRecord, lane: Lane | None) -> None:
        stall_s, transfer_s = record.values["stall_s"], record.values.get("transfer_s", 0.0)
        self._add("stall_ms", record, 1e3 * stall_s)
        self.num_stalls[record.replica] = self.num_stalls.get(record.replica, 0) + 1
        self.stalled_s[record.replica] = self.stalled_s.get(record.replica, 0.0) + stall_s
        if lane is not None:
            lane.stalls.append(Stall(record.time_s, record.step, stall_s, transfer_s))
