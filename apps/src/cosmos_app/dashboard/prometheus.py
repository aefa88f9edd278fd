"""A run's figures in Prometheus' text format, read from the feed when they are asked for."""

from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from cosmos_app.dashboard.feed import RunFeed
from cosmos_app.dashboard.totals import Totals
from cosmos_app.dashboard.view import replica_views, run_view


def exposition(feed: RunFeed, now_s: float, *, num_refused: int = 0) -> bytes:
    """Return the page that Prometheus scrapes.

    Args:
        feed: what is known of the run.
        now_s: seconds since the epoch.
        num_refused: requests without the right token so far.
    """
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_FeedCollector(feed, now_s))
    registry.register(RefusalCollector(num_refused))
    return generate_latest(registry)


class RefusalCollector(Collector):
    """How many requests came without the right token."""

    def __init__(self, num_refused: int) -> None:
        """Tell of so many."""
        self._num_refused = num_refused

    def collect(self) -> Iterable[Metric]:
        """Return the one family."""
        yield CounterMetricFamily(
            "cosmos_requests_refused", "Requests without the right token.", self._num_refused
        )


class _FeedCollector(Collector):
    def __init__(self, feed: RunFeed, now_s: float) -> None:
        self._feed = feed
        self._now_s = now_s

    def collect(self) -> Iterable[Metric]:
        """Return every family."""
        yield from self._run()
        yield from self._replicas()
        yield from self._measurements()

    def _run(self) -> Iterator[Metric]:
        run = run_view(self._feed, self._now_s)
        yield GaugeMetricFamily("cosmos_run_up", "1 while the run runs.", run.state == "running")
        yield GaugeMetricFamily("cosmos_step", "Optimizer steps committed.", run.step)
        yield GaugeMetricFamily("cosmos_steps_planned", "Optimizer steps in all.", run.num_steps)
        groups = GaugeMetricFamily("cosmos_groups", "Groups in flight.", labels=["stage"])
        for stage, count in run.books.get("in_flight", {}).items():
            groups.add_metric([stage], count)
        yield groups
        yield from _counters(self._feed.totals)

    def _replicas(self) -> Iterator[Metric]:
        labels = ["replica", "role"]
        version = GaugeMetricFamily("cosmos_weight_version", "Version held.", labels=labels)
        busy = GaugeMetricFamily("cosmos_busy_groups", "Groups worked on.", labels=labels)
        slots = GaugeMetricFamily("cosmos_slots", "Groups at once, at most.", labels=labels)
        silent = GaugeMetricFamily("cosmos_silent_seconds", "Since progress.", labels=labels)
        loads = CounterMetricFamily("cosmos_weight_loads", "Versions loaded.", labels=labels)
        stalled = CounterMetricFamily(
            "cosmos_stalled_seconds", "Generation stood still for weights.", labels=labels
        )
        skipped = CounterMetricFamily(
            "cosmos_publications_skipped", "Versions not published at once.", labels=labels
        )
        for replica in replica_views(self._feed):
            names = [replica.name, replica.role]
            if replica.version is not None:
                version.add_metric(names, replica.version)
            busy.add_metric(names, replica.busy)
            slots.add_metric(names, replica.slots)
            if replica.silent_s is not None:
                silent.add_metric(names, replica.silent_s)
            loads.add_metric(names, replica.num_loads)
            stalled.add_metric(names, replica.stalled_s)
            skipped.add_metric(names, replica.num_skipped)
        yield from (version, busy, slots, silent, loads, stalled, skipped)

    def _measurements(self) -> Iterator[Metric]:
        family = GaugeMetricFamily(
            "cosmos_measurement",
            "The newest value of each measurement.",
            labels=["replica", "role", "name"],
        )
        for replica, record in self._feed.history.latest.items():
            for name, value in record.values.items():
                family.add_metric([replica, record.role, name], value)
        yield family


def _counters(totals: Totals) -> Iterator[Metric]:
    if totals.issued is None:
        return  # a counter that is not known is not 0, from where it would jump
    ended = CounterMetricFamily(
        "cosmos_groups_ended",
        "Groups consumed or dropped, steps that were lost counted.",
        labels=["how"],
    )
    for how, count in totals.ended.items():
        ended.add_metric([how], count)
    yield ended
    yield CounterMetricFamily("cosmos_groups_issued", "Groups ever issued.", totals.issued)
