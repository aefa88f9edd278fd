"""What the dashboard shows, as plain values: the answers of its HTTP API.

Times are seconds since the epoch. A number that is not there or not finite is null.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from cosmos_app.dashboard.feed import RunFeed
from cosmos_app.dashboard.history import Lane
from cosmos_app.dashboard.pictures import picture_name
from cosmos_app.event_log import tell_event
from cosmos_app.natural_order import by_number

_SILENT_S = 10.0
_MOST_REPLICAS = 100

WhichEvents = Literal["all", "milestones"]
RunState = Literal["starting", "running", "finished", "silent"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RunView:
    """How the run stands.

    Attributes:
        name: of its directory.
        state: ``silent`` if its controller says nothing.
        message: one sentence: what it waits for, why it ended, or what is wrong.
        step: steps done.
        num_steps: steps in all; 0 if unknown.
        created_s: when it was created.
        seen_s: time of the newest fact.
        books: groups issued, consumed, dropped by reason, in flight by stage.
        accuracies: mean validation reward by weight version.
        data_sets: the same of each data set that held-out prompts name.
    """

    name: str
    state: RunState
    message: str
    step: int
    num_steps: int
    created_s: float
    seen_s: float
    books: Mapping[str, Any]
    accuracies: Mapping[str, float]
    data_sets: Mapping[str, Mapping[str, float]]


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaView:
    """One replica, and in words what it is doing now.

    Attributes:
        name: its name.
        role: policy or rollout.
        doing: what it is doing.
        version: weight version it holds.
        busy: groups it works on.
        slots: groups it can work on at once.
        silent_s: seconds since it last showed progress; null for a recorded run.
        idle_share: share of its time without work, as last measured.
        num_loads: weight versions it loaded.
        stalled_s: seconds that its generation stood still for them.
        num_skipped: versions that a policy did not publish with their step, for want of room.
        publish_ms: for how long its last publication held a policy up; null where there is none.
        served_s: seconds from the last publication until a rollout sampled with it; null likewise.
    """

    name: str
    role: str
    doing: str
    version: int | None
    busy: int
    slots: int
    silent_s: float | None
    idle_share: float | None
    num_loads: int
    stalled_s: float
    num_skipped: int
    publish_ms: float | None
    served_s: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class CurveView:
    """Measurements of one thing; the three lists are of one length."""

    times_s: list[float]
    steps: list[int]
    values: list[float]


@dataclass(frozen=True, kw_only=True, slots=True)
class SpanView:
    """What a replica did for a while: the share of each state; the rest of it was idle."""

    start_s: float
    end_s: float
    shares: Mapping[str, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class StallView:
    """One weight version arriving at a replica."""

    time_s: float
    version: int
    stall_s: float
    transfer_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class LaneView:
    """One replica on the timeline."""

    name: str
    role: str
    spans: list[SpanView]
    stalls: list[StallView]


@dataclass(frozen=True, kw_only=True, slots=True)
class TextSpan:
    """Consecutive tokens of one weight version; -1 for tokens that nobody sampled."""

    version: int
    num_tokens: int
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleView:
    """One sample, in spans of equal weight version; a long one is without its last tokens.

    ``pictures`` are names to ask ``/api/pictures/NAME`` for.
    """

    time_s: float
    replica: str
    group: str
    reward: float
    finish_reason: str
    spans: list[TextSpan]
    num_left_out: int
    pictures: list[str]


@dataclass(frozen=True, kw_only=True, slots=True)
class EventView:
    """One thing that happened."""

    time_s: float
    type: str
    replica: str
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class PageView:
    """Everything on the page; ``revision`` grows when any of it changes."""

    revision: int
    run: RunView
    replicas: list[ReplicaView]
    curves: Mapping[str, CurveView]
    timeline: list[LaneView]
    samples: list[SampleView]
    events: list[EventView]


# ---------------------------------------------------------------- making them


def run_view(feed: RunFeed, now_s: float) -> RunView:
    """Return how the run stands; ``now_s`` tells a controller that is silent."""
    status, report, history = feed.status, feed.report, feed.history
    state, message = _state(feed, now_s)
    reward = history.curves["reward"].newest
    measured = reward.step + 1 if reward else 0
    accuracies: Mapping[str, Any] = report.get("accuracies", {})
    data_sets: Mapping[str, Mapping[str, float]] = report.get("data_sets", {})
    if status:
        validations = status.get("validations", {})
        accuracies = {v: r["mean_reward"] for v, r in validations.items()}
        data_sets = _by_set({v: r.get("of_sets", {}) for v, r in validations.items()})
    return RunView(
        name=feed.run.name,
        state=state,
        message=message,
        step=int(status.get("step", report.get("steps", measured))),
        num_steps=int(status.get("num_steps", feed.num_steps or report.get("steps", 0))),
        created_s=feed.run.created_s,
        seen_s=max(history.last_s, float(status.get("time_s", 0.0))),
        books=feed.books,
        accuracies={
            version: value for version, value in accuracies.items() if _number(value) is not None
        },
        data_sets=data_sets,
    )


def _by_set(by_version: Mapping[str, Mapping[str, float]]) -> dict[str, dict[str, float]]:
    """Turn rewards of sets, by version, into rewards of versions, by set."""
    names = sorted({name for of_sets in by_version.values() for name in of_sets})
    return {
        name: {v: of_sets[name] for v, of_sets in by_version.items() if name in of_sets}
        for name in names
    }


def _state(feed: RunFeed, now_s: float) -> tuple[RunState, str]:
    status, report = feed.status, feed.report
    if status.get("finished") or (report and feed.problem):
        return "finished", str(status.get("finished") or report.get("finished", ""))
    if feed.problem:
        is_new = not status and not feed.history.last_s
        return ("starting" if is_new else "silent"), feed.problem
    if not status:
        return "starting", "nothing has been heard of the run yet"
    age_s = now_s - status["time_s"]
    if age_s > _SILENT_S:
        return "silent", f"the controller is silent for {age_s:.0f} s"
    return "running", f"waiting for {status.get('waiting_for')}"


def replica_views(feed: RunFeed) -> list[ReplicaView]:
    """Return the replicas: those that the controller knows, or those that measured something."""
    known: Mapping[str, Mapping[str, Any]] = feed.status.get("replicas", {})
    lanes = feed.history.lanes
    names = sorted(known or lanes, key=by_number)
    return [
        _replica_view(name, known.get(name, {}), feed)
        for name in names[:_MOST_REPLICAS]
        if name in known or lanes[name].role in {"policy", "rollout"}
    ]


def _replica_view(name: str, known: Mapping[str, Any], feed: RunFeed) -> ReplicaView:
    history = feed.history
    latest = history.latest.get(name)
    role = str(known.get("role") or history.lanes[name].role)
    version = known.get("version")
    if version is None and latest is not None:
        version = latest.step + (role == "policy")
    values = latest.values if latest else {}
    publish_s = _number(values.get("publish_s"))
    return ReplicaView(
        name=name,
        role=role,
        doing=_doing(role, known, feed.status) if known else "the run is over",
        version=version,
        busy=int(known.get("busy", 0)),
        slots=int(known.get("slots", 0)),
        silent_s=known.get("silent_s"),
        idle_share=_number(values.get("idle_share")),
        num_loads=history.num_stalls.get(name, 0),
        stalled_s=history.stalled_s.get(name, 0.0),
        num_skipped=history.num_skipped.get(name, 0),
        publish_ms=None if publish_s is None else 1e3 * publish_s,
        served_s=_number(values.get("served_s")),
    )


def _doing(role: str, known: Mapping[str, Any], status: Mapping[str, Any]) -> str:
    if status.get("finished"):
        return "finished"
    if role == "policy":
        training: Mapping[str, Any] | None = status.get("training")
        if training is None:
            return f"waiting for step {status.get('step', 0) + 1}"
        if known["version"] > training["step"]:
            return f"done with step {training['step'] + 1}"
        return f"training step {training['step'] + 1} for {training['for_s']:.1f} s"
    loading = known.get("loading")
    fetching = f", fetching version {loading}" if loading not in {None, -1} else ""
    if known["busy"]:
        return f"generating {known['busy']} of {known['slots']} groups{fetching}"
    return f"idle{fetching}"


def curve_views(feed: RunFeed) -> dict[str, CurveView]:
    """Return every curve that has a measurement."""
    found = dict[str, CurveView]()
    for name, curve in feed.history.curves.items():
        points = curve.points()
        if points:
            found[name] = CurveView(
                times_s=[point.time_s for point in points],
                steps=[point.step for point in points],
                values=[point.value for point in points],
            )
    return found


def timeline_view(feed: RunFeed, window_s: float) -> list[LaneView]:
    """Return what each replica did in the last ``window_s`` of what is known.

    Rollouts that are gone, and were before that, are left out.
    """
    since_s = feed.history.last_s - window_s
    known: Mapping[str, Any] = feed.status.get("replicas", {})
    lanes = feed.history.lanes
    order = sorted(lanes, key=lambda name: (lanes[name].role != "policy", by_number(name)))
    return [
        _lane_view(name, lanes[name], since_s)
        for name in order
        if lanes[name].role == "policy"
        or (lanes[name].role == "rollout" and (name in known or lanes[name].seen_s >= since_s))
    ]


def _lane_view(name: str, lane: Lane, since_s: float) -> LaneView:
    return LaneView(
        name=name,
        role=lane.role,
        spans=[
            SpanView(start_s=max(s.start_s, since_s), end_s=s.end_s, shares=s.shares)
            for s in lane.spans
            if s.end_s > since_s
        ],
        stalls=[
            StallView(
                time_s=stall.time_s,
                version=stall.version,
                stall_s=stall.stall_s,
                transfer_s=stall.transfer_s,
            )
            for stall in lane.stalls
            if stall.time_s > since_s
        ],
    )


def sample_views(feed: RunFeed) -> list[SampleView]:
    """Return the newest samples, newest first."""
    return [
        SampleView(
            time_s=sample.time_s,
            replica=sample.replica,
            group=sample.group,
            reward=sample.reward,
            finish_reason=sample.finish_reason,
            spans=[
                TextSpan(version=version, num_tokens=num_tokens, text=text)
                for version, num_tokens, text in sample.spans
            ],
            num_left_out=sample.num_left_out,
            pictures=[picture_name(reference) for reference in sample.images],
        )
        for sample in reversed(feed.samples)
    ]


def event_views(feed: RunFeed, most: int, *, which: WhichEvents = "all") -> list[EventView]:
    """Return the newest events, newest first; ``milestones`` leaves routine out."""
    events = feed.events if which == "all" else feed.milestones
    newest = list(events)[-most:] if most else []
    return [
        EventView(
            time_s=event["time_s"],
            type=event["type"],
            replica=str(event.get("replica", "")),
            text=tell_event(event),
        )
        for event in reversed(newest)
    ]


def page_view(feed: RunFeed, *, now_s: float, window_s: float, most_events: int) -> PageView:
    """Return everything on the page."""
    return PageView(
        revision=feed.revision,
        run=run_view(feed, now_s),
        replicas=replica_views(feed),
        curves=curve_views(feed),
        timeline=timeline_view(feed, window_s),
        samples=sample_views(feed),
        events=event_views(feed, most_events, which="milestones"),
    )


def _number(value: Any) -> float | None:
    """Return a finite number, or none: JSON has no other, and NaN may come as text."""
    if isinstance(value, int | float) and math.isfinite(value):
        return float(value)
    return None
