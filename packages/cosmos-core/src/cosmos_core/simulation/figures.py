"""What a log says of a system: speed, idle time on both sides, stalls, staleness, bias."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from cosmos_core.errors import CosmosError
from cosmos_core.simulation.log import LogRecord, QueueDepths, Span, StepTaken

IDLE_POLICY = ("wait_data",)
STALLS = ("paused_for_weights", "swap")


class TooShortError(CosmosError):
    """Raised when a log has too few steps to say anything about a steady state."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Spread:
    """Median, 99th percentile and maximum of some values; 0 if there are none."""

    p50: float
    p99: float
    max: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Capacity:
    """What the rollout replicas could do at best.

    Attributes:
        rollouts: how many there are.
        tokens_per_s: of one, with a full batch.
        max_running: requests in a full batch.
    """

    rollouts: int
    tokens_per_s: float
    max_running: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Figures:
    """A system between two steps' ends.

    Attributes:
        steps: optimizer steps in that time.
        step_s: seconds of each, on average.
        policy_idle: share of the policy's time without data to train on.
        rollout_idle_tokens: share of the tokens that full engines would have made and these did
            not.
        rollout_idle_slots: share of the places in the engines' batches, over time, that were empty.
        push_policy_ms: time that the policy stood still for a publication, each step.
        push_rollout_ms: time that an engine stood still for weights, each step.
        swap_ms: time that an engine stood still to put a version in place.
        staleness_first: versions between a trained sample's first token and its step.
        staleness_last: the same of its last token.
        length_ratio: mean trained length over mean generated length, since the start; 1 when
            nothing is biased.
        dropped: share of the groups that were given up, since the start.
        denied: slots that stood empty since admission withheld prompts, on average.
        environment_wait: share of the engines' time in which they decoded nothing since samples
            waited for their environment.
        withheld: share of the engines' time in which they held nothing since admission withheld it.
        no_work: share of their time in which they held nothing, but a group was on its way.
    """

    steps: int
    step_s: float
    policy_idle: float
    rollout_idle_tokens: float
    rollout_idle_slots: float
    push_policy_ms: float
    push_rollout_ms: float
    swap_ms: Spread
    staleness_first: Spread
    staleness_last: Spread
    length_ratio: float
    dropped: float
    denied: float
    environment_wait: float = 0.0
    withheld: float = 0.0
    no_work: float = 0.0

    @property
    def steps_per_hour(self) -> float:
        """Optimizer steps in an hour."""
        return 3600.0 / self.step_s


def figures_of(log: Sequence[LogRecord], capacity: Capacity, *, skip: int) -> Figures:
    """Return the figures from the end of step ``skip - 1`` to that of the last step of the log.

    A step that was taken anew, as the policy had died, counts as it was in the end.

    Args:
        log: of all replicas and the controller.
        capacity: of the rollout replicas.
        skip: steps at the start, with engines still filling, that are left out; at least 1.

    Raises:
        TooShortError: if no step is left.
    """
    last = {record.step: record for record in log if isinstance(record, StepTaken)}
    taken = [last[step] for step in sorted(last)]
    if not 1 <= skip < len(taken):
        raise TooShortError(f"the log has {len(taken)} steps; {skip} are left out, at least 1")
    begin_s, end_s = taken[skip - 1].end_s, taken[-1].end_s
    measured, seconds = taken[skip:], end_s - begin_s
    spans = list(_clipped((r for r in log if isinstance(r, Span)), begin_s, end_s))
    decoding = [span for span in spans if span.activity == "decode"]
    full = capacity.rollouts * seconds
    stalls = _seconds(spans, STALLS) / capacity.rollouts
    swaps = [r for r in log if isinstance(r, Span) and r.activity == "swap"]
    return Figures(
        steps=len(measured),
        step_s=seconds / len(measured),
        policy_idle=_seconds(spans, IDLE_POLICY) / seconds,
        rollout_idle_tokens=1 - sum(s.tokens for s in decoding) / (capacity.tokens_per_s * full),
        rollout_idle_slots=1
        - sum(s.width * (s.end_s - s.start_s) for s in decoding) / (capacity.max_running * full),
        push_policy_ms=1e3 * _seconds(spans, ("push_exposed",)) / len(measured),
        push_rollout_ms=1e3 * stalls / len(measured),
        swap_ms=_spread([1e3 * (s.end_s - s.start_s) for s in swaps if s.start_s >= begin_s]),
        staleness_first=_spread([s.step - x.oldest_version for s in measured for x in s.samples]),
        staleness_last=_spread([s.step - x.newest_version for s in measured for x in s.samples]),
        environment_wait=_seconds(spans, ("env_wait",)) / full,
        withheld=_seconds(spans, ("gated_staleness",)) / full,
        no_work=_seconds(spans, ("idle_no_work",)) / full,
        **_balance(taken, [r for r in log if isinstance(r, QueueDepths)]),
    )


def _balance(taken: Sequence[StepTaken], depths: Sequence[QueueDepths]) -> dict[str, float]:
    if not depths:
        return {"length_ratio": math.nan, "dropped": math.nan, "denied": math.nan}
    last = depths[-1]
    lengths = [sample.num_tokens for step in taken for sample in step.samples]
    generated = last.generated_tokens / max(1, last.generated_samples)
    return {
        "length_ratio": sum(lengths) / len(lengths) / generated,
        "dropped": last.dropped / max(1, last.dropped + last.consumed),
        "denied": sum(depth.denied for depth in depths) / len(depths),
    }


def _clipped(spans: Iterable[Span], begin_s: float, end_s: float) -> Iterable[Span]:
    """Yield what lies between two times, with the tokens of that part."""
    for span in spans:
        start, end = max(span.start_s, begin_s), min(span.end_s, end_s)
        if start < end:
            share = (end - start) / (span.end_s - span.start_s)
            yield Span(
                role=span.role,
                replica=span.replica,
                activity=span.activity,
                start_s=start,
                end_s=end,
                version=span.version,
                width=span.width,
                tokens=span.tokens * share,
            )


def _seconds(spans: Iterable[Span], activities: Sequence[str]) -> float:
    return sum(span.end_s - span.start_s for span in spans if span.activity in activities)


def _spread(values: Sequence[float]) -> Spread:
    if not values:
        return Spread(p50=0.0, p99=0.0, max=0.0)
    ordered = sorted(values)
    last = len(ordered) - 1
    return Spread(p50=ordered[round(0.5 * last)], p99=ordered[round(0.99 * last)], max=ordered[-1])
