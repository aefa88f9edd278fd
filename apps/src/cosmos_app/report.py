"""The report of a run: one frozen value, computed from what the run left behind.

Everything in it can be recomputed from ``metrics.jsonl`` and ``status.json`` of the run directory.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from cosmos_app.natural_order import by_number
from cosmos_app.output import finite
from cosmos_app.supervisor import Incident
from cosmos_core.metrics import MetricRecord, of_data_sets

_BARS = "▁▂▃▄▅▆▇█"
_CURVE_WIDTH = 40
_MOST_ROWS = 8
_NOT_A_NUMBER = re.compile(r"\bnan%?")


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """One prompt and what the model answered, for a person to look at."""

    prompt: str
    response: str
    reward: float
    version: int


@dataclass(frozen=True, kw_only=True, slots=True)
class RunReport:
    """What a run did, with the numbers its claims rest on.

    Attributes:
        run_dir: where it all lies.
        finished: why the run ended.
        seconds: wall time from the first process to the last.
        steps: optimizer steps committed.
        rewards: mean training reward of each step.
        accuracies: mean validation reward by weight version.
        best_of_several: of the best of a prompt's answers, by weight version; empty where
            each prompt is answered once.
        data_sets: mean validation reward by data set, each by weight version; empty where prompts
            name none.
        policy_idle: share of the policy replicas' time spent waiting for data.
        rollout_idle: share of the rollout replicas' time with nothing to decode.
        validated_s: seconds that training waited for validations, the one before the first step
            included: of all steps, and of the one that waited longest.
        stall_ms: time generation stood still per commit, before prefills anew: median, maximum.
        transfer_ms: time a weight version was on its way, generation going on: median, maximum.
        wire_mib: MiB that a load fetched from others, of adapters alone where they are trained:
            median and maximum.
        publish_ms: time training stood still per publication, for its snapshot, or to find no room
            for one, on the rank where that was longest: median, maximum.
        publications_skipped: versions not published with their step, while rollouts read others.
        served_s: seconds from a publication until a replica sampled with it, which finishes a
            load in hand first: median and maximum over replicas and versions.
        publish_ms_of: `publish_ms` of each policy replica, by name.
        served_s_of: `served_s` of each rollout replica, by name.
        first_group_s: seconds from when a rollout replica joined until it had finished a group:
            median and maximum over all that joined.
        num_loads: weight versions committed by rollout replicas.
        staleness: mean and maximum of (training version - oldest token's version) over groups.
        mismatch: mean |log p_train - log p_rollout| per token: of tokens sampled by the version
            trained on, where only the engines differ (and the keys and values that a response
            kept over a switch), and of all tokens, where staleness adds.
        switched: share of samples with tokens of more than one weight version.
        length_ratio: mean trained length over mean generated length; 1 when nothing is biased.
        books: issued = consumed + dropped + in flight, in groups.
        failures: samples that failed and were not trained on, by what failed.
        incidents: processes that died unasked, and what was done.
        samples: a few texts.
        export: the Hugging Face checkpoint, if one was written.
    """

    run_dir: str
    finished: str
    seconds: float
    steps: int
    rewards: tuple[float, ...]
    accuracies: Mapping[int, float]
    best_of_several: Mapping[int, float]
    data_sets: Mapping[str, Mapping[int, float]]
    policy_idle: float
    rollout_idle: float
    validated_s: tuple[float, float]
    stall_ms: tuple[float, float]
    transfer_ms: tuple[float, float]
    wire_mib: tuple[float, float]
    publish_ms: tuple[float, float]
    publications_skipped: int
    served_s: tuple[float, float]
    publish_ms_of: Mapping[str, tuple[float, float]]
    served_s_of: Mapping[str, tuple[float, float]]
    first_group_s: tuple[float, float]
    num_loads: int
    staleness: tuple[float, float]
    mismatch: tuple[float, float]
    switched: float
    length_ratio: float
    books: Mapping[str, Any]
    failures: Mapping[str, int]
    incidents: tuple[Incident, ...]
    samples: tuple[Sample, ...]
    export: str

    def to_json(self) -> dict[str, Any]:
        """Return the report as plain data; what was not measured is ``None``."""
        return finite(asdict(self))


def _values(records: Sequence[MetricRecord], role: str, name: str) -> list[float]:
    return [r.values[name] for r in records if r.role == role and name in r.values]


def _last_of_each(records: Sequence[MetricRecord], role: str, name: str) -> list[float]:
    last = {r.replica: r.values[name] for r in records if r.role == role and name in r.values}
    return list(last.values())


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else float("nan")


def _per_token(records: Sequence[MetricRecord], name: str, share: str | None = None) -> float:
    """Return the mean over tokens of what each step says of its tokens, or of a share of them."""
    found = [r.values for r in records if r.role == "policy" and name in r.values]
    weights = [v.get("tokens", 1.0) * (v.get(share, 1.0) if share else 1.0) for v in found]
    if not (total := sum(weights)):
        return float("nan")
    return sum(w * v[name] for w, v in zip(weights, found, strict=True)) / total


def median(values: Sequence[float]) -> float:
    """Return the upper median; not a number when there is nothing."""
    return sorted(values)[len(values) // 2] if values else float("nan")


def _median_and_max(values: Sequence[float]) -> tuple[float, float]:
    return median(values), max(values, default=float("nan"))


def _of_each(
    records: Sequence[MetricRecord], role: str, name: str, factor: float
) -> dict[str, tuple[float, float]]:
    """Return median and maximum of what each replica of a role measured, by its name."""
    found: dict[str, list[float]] = {}
    for record in records:
        if record.role == role and name in record.values:
            found.setdefault(record.replica, []).append(factor * record.values[name])
    return {replica: _median_and_max(found[replica]) for replica in sorted(found, key=by_number)}


def _length_ratio(records: Sequence[MetricRecord]) -> float:
    trained = _values(records, "controller", "trained_length")
    generated = _values(records, "controller", "generated_length")
    return _mean(trained) / generated[-1] if generated and generated[-1] else float("nan")


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What the launcher knows that the metrics do not say."""

    run_dir: Path
    finished: str
    seconds: float
    accuracies: Mapping[int, float]
    best_of_several: Mapping[int, float]
    books: Mapping[str, Any]
    failures: Mapping[str, int]
    incidents: Sequence[Incident]
    samples: Sequence[Sample]
    export: str


def build_report(records: Sequence[MetricRecord], outcome: Outcome) -> RunReport:
    """Return the report of a run from its metrics and its outcome."""
    by_step = {
        r.step: r.values["reward"]
        for r in records
        if r.role == "controller" and "reward" in r.values
    }
    validated_s = _values(records, "controller", "validated_s")
    stalls = [1e3 * s for s in _values(records, "rollout", "stall_s")]
    transfers = [1e3 * s for s in _values(records, "rollout", "transfer_s")]
    return RunReport(
        run_dir=str(outcome.run_dir),
        finished=outcome.finished,
        seconds=outcome.seconds,
        steps=len(by_step),
        rewards=tuple(by_step[step] for step in sorted(by_step)),
        accuracies=dict(outcome.accuracies),
        best_of_several=dict(outcome.best_of_several),
        data_sets=_data_sets(records),
        policy_idle=_mean(_last_of_each(records, "policy", "idle_share")),
        rollout_idle=_mean(_last_of_each(records, "rollout", "idle_total_share")),
        validated_s=(sum(validated_s), max(validated_s, default=0.0)),
        stall_ms=_median_and_max(stalls),
        transfer_ms=_median_and_max(transfers),
        wire_mib=_median_and_max(_values(records, "rollout", "wire_mib")),
        publish_ms=_median_and_max([1e3 * s for s in _values(records, "policy", "publish_s")]),
        publications_skipped=int(sum(_values(records, "policy", "publications_skipped"))),
        served_s=_median_and_max(_values(records, "rollout", "served_s")),
        publish_ms_of=_of_each(records, "policy", "publish_s", 1e3),
        served_s_of=_of_each(records, "rollout", "served_s", 1.0),
        first_group_s=_median_and_max(_values(records, "rollout", "first_group_s")),
        num_loads=len(stalls),
        staleness=(
            _mean(_values(records, "controller", "staleness_mean")),
            max(_values(records, "controller", "staleness_max"), default=float("nan")),
        ),
        mismatch=(
            _per_token(records, "lag0_abs", "lag0_tokens"),
            _per_token(records, "mismatch_abs"),
        ),
        switched=_mean(_values(records, "policy", "switched")),
        length_ratio=_length_ratio(records),
        books=dict(outcome.books),
        failures=dict(outcome.failures),
        incidents=tuple(outcome.incidents),
        samples=tuple(outcome.samples),
        export=outcome.export,
    )


def _data_sets(records: Sequence[MetricRecord]) -> dict[str, dict[int, float]]:
    found: dict[str, dict[int, float]] = {}
    for record in records:
        if record.role != "validation":
            continue
        for name, reward in of_data_sets(record.values).items():
            found.setdefault(name, {})[record.step] = reward
    return {name: dict(sorted(of.items())) for name, of in sorted(found.items())}


def curve(values: Sequence[float], width: int = _CURVE_WIDTH) -> str:
    """Return values as a row of bars between their minimum and maximum, averaged to ``width``."""
    if not values:
        return ""
    columns = min(width, len(values))
    means = [
        _mean(values[i * len(values) // columns : (i + 1) * len(values) // columns])
        for i in range(columns)
    ]
    low, high = min(means), max(means)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((value - low) * scale)] for value in means)


def _numbers(report: RunReport) -> Table:
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    staleness_mean, staleness_max = report.staleness
    rows = [
        ("policy idle", f"{report.policy_idle:.1%}"),
        ("rollout idle", f"{report.rollout_idle:.1%}"),
        (
            "training held up by validations",
            f"{report.validated_s[0]:.2f} s, one step {report.validated_s[1]:.2f} s at most",
        ),
        (
            "weight sync stall",
            f"median {report.stall_ms[0]:.0f} ms, max {report.stall_ms[1]:.0f} ms "
            f"over {report.num_loads} loads",
        ),
        (
            "weight transfer, unstalled",
            f"median {report.transfer_ms[0]:.0f} ms, max {report.transfer_ms[1]:.0f} ms",
        ),
        (
            "weights fetched per load",
            f"median {report.wire_mib[0]:.3g} MiB, max {report.wire_mib[1]:.3g} MiB",
        ),
        (
            "weights published, training stalled",
            f"median {report.publish_ms[0]:.1f} ms, max {report.publish_ms[1]:.1f} ms"
            + (f", {n} skipped" if (n := report.publications_skipped) else ""),
        ),
        *_rows_of_each(report.publish_ms_of, "{:.1f} ms"),
        (
            "weights served after",
            f"median {report.served_s[0]:.2f} s, max {report.served_s[1]:.2f} s",
        ),
        *_rows_of_each(report.served_s_of, "{:.2f} s"),
        (
            "rollouts' first group after joining",
            f"median {report.first_group_s[0]:.2f} s, max {report.first_group_s[1]:.2f} s",
        ),
        ("staleness in versions", f"mean {staleness_mean:.2f}, max {staleness_max:.0f}"),
        ("responses over a version switch", f"{report.switched:.1%}"),
        (
            "|log p train - log p rollout|",
            f"{report.mismatch[0]:.1e} at the same version, {report.mismatch[1]:.1e} over all",
        ),
        ("trained / generated length", f"{report.length_ratio:.3f}"),
    ]
    rows = [(name, _NOT_A_NUMBER.sub("-", value)) for name, value in rows]  # not measured
    rows.append(("books, in groups", describe_books(report.books)))
    if report.failures:
        failed = (f"{count} of {kind}" for kind, count in sorted(report.failures.items()))
        rows.append(("samples that failed", ", ".join(failed)))
    for name, value in rows:
        table.add_row(Text(name, "dim"), Text(value))
    return table


def _rows_of_each(figures: Mapping[str, tuple[float, float]], form: str) -> list[tuple[str, str]]:
    """Return a row for each replica where there are a few; one alone has that of all."""
    if not 1 < len(figures) <= _MOST_ROWS:
        return []
    return [
        (f"  {name}", f"median {form.format(middle)}, max {form.format(most)}")
        for name, (middle, most) in figures.items()
    ]


def describe_books(books: Mapping[str, Any]) -> str:
    """Say issued = consumed + dropped + in flight, leaving out what is 0."""
    parts = [f"consumed {books.get('consumed', 0)}"]
    for column in ("dropped", "in_flight"):
        parts.extend(f"{name} {count}" for name, count in books.get(column, {}).items() if count)
    return f"issued {books.get('issued', 0)} = {' + '.join(parts)}"


def _samples(report: RunReport) -> Table:
    table = Table("prompt", "answer", "reward", "version", title="held-out samples")
    for sample in report.samples:
        table.add_row(
            Text(sample.prompt), Text(sample.response), f"{sample.reward:.0f}", str(sample.version)
        )
    return table


def print_report(report: RunReport, console: Console) -> None:
    """Show the report in a terminal."""
    parts: list[Any] = []
    if report.rewards:
        tail = report.rewards[-10:]
        parts.append(
            Text(
                f"reward  {report.rewards[0]:.2f} {curve(report.rewards)} {_mean(tail):.2f}"
                f"  ({report.steps} steps)"
            )
        )
    versions = sorted(report.accuracies)
    if versions:
        shown = ", ".join(f"{report.accuracies[v]:.3f} at version {v}" for v in versions)
        gain = report.accuracies[versions[-1]] - report.accuracies[versions[0]]
        parts.append(Text(f"held-out reward  {shown}  (change {gain:+.3f})", style="bold"))
    if best := report.best_of_several:
        shown = ", ".join(f"{best[v]:.3f} at version {v}" for v in sorted(best))
        parts.append(Text(f"best of a prompt's answers  {shown}"))
    parts.extend(_data_set_lines(report.data_sets))
    parts.append(_numbers(report))
    parts.extend(
        Text(f"! {incident.name} died: {incident.how}; {incident.outcome}", "yellow")
        for incident in report.incidents
    )
    if report.samples:
        parts.append(_samples(report))
    title = f"{report.run_dir}: {report.finished} after {report.seconds:.0f} s"
    console.print(Panel(Group(*parts), title=Text(title)))
    if report.export:
        said = f"Hugging Face checkpoint: {report.export}"
        console.print(said, soft_wrap=True, markup=False)


def _data_set_lines(data_sets: Mapping[str, Mapping[int, float]]) -> list[Text]:
    width = max(map(len, data_sets), default=0)
    lines = list[Text]()
    for name, by_version in data_sets.items():
        first, last = next(iter(by_version.values())), list(by_version.values())[-1]
        lines.append(
            Text(
                f"  {name:<{width}}  {first:.3f} {curve(list(by_version.values()))} {last:.3f}"
                f"  ({last - first:+.3f})"
            )
        )
    return lines
