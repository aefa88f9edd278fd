"""Metric records for a person: a progress bar on a terminal, plain lines anywhere else.

step  120/200 ━━━━━━━━━━━━━━━╸━━━━━━━━━━ 60%  1:12 left
reward 0.312  staleness 1.4  loss -0.02  policy idle 12%  rollout idle 3%
"""

from collections import deque
from collections.abc import Mapping, Sequence

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from cosmos_core.metrics.record import MetricRecord, of_data_sets

_STEPS_OF_RATE = 20
_REDRAW_S = 0.2


class ConsoleSink:
    """Shows how far training is and the latest figures, averaged over the replicas of a role.

    A record of role "controller" with step k says that k is done. One of role "validation" has a
    line of its own. While the bar is drawn, whatever else is printed to the same console appears
    above it.
    """

    def __init__(
        self, console: Console, *, num_steps: int, show: Sequence[str], every: int
    ) -> None:
        self._console = console
        self._num_steps = num_steps
        self._show = tuple(show)
        self._every = every
        self._latest: dict[str, dict[str, float]] = {name: {} for name in self._show}
        self._finished = deque[tuple[float, int]](maxlen=_STEPS_OF_RATE)
        self._drawn_s = float("-inf")
        self._live: Live | None = None

    def write(self, record: MetricRecord) -> None:
        """Take the record in; draws at most every fifth of a second, and at every finished step."""
        for name, value in record.values.items():
            shown = self._latest.get(f"{record.role}/{name}")
            if shown is not None:
                shown[record.replica] = value
        if record.role == "validation":
            self._console.print(Text(_validation_line(record)), soft_wrap=True)
        steps_done = record.step + 1
        advanced = record.role == "controller" and steps_done > self._steps_done()
        if advanced:
            self._finished.append((record.time_s, steps_done))
        if self._console.is_terminal:
            self._draw(record.time_s, at_once=advanced)
        elif advanced and (steps_done % self._every == 0 or steps_done == self._num_steps):
            self._console.print(Text(self._line()), soft_wrap=True)

    def close(self) -> None:
        """Draw the last state and leave it standing."""
        if self._live is not None:
            self._live.update(self._panel(), refresh=True)
            self._live.stop()
            self._live = None

    def _steps_done(self) -> int:
        return self._finished[-1][1] if self._finished else 0

    def _draw(self, now_s: float, *, at_once: bool) -> None:
        if self._live is None:
            self._live = Live(console=self._console, auto_refresh=False)
            self._live.start()
        if at_once or now_s - self._drawn_s >= _REDRAW_S:
            self._live.update(self._panel(), refresh=True)
            self._drawn_s = now_s

    def _line(self) -> str:
        steps = f"step {self._steps_done()}/{self._num_steps}"
        return "  ".join([steps, *self._figures(), *self._time_left()])

    def _panel(self) -> Group:
        done = self._steps_done()
        share = f"{100 * done // max(self._num_steps, 1)}%"
        row = Table.grid(padding=(0, 1))
        row.add_row(
            Text(f"step {done:>4}/{self._num_steps}", style="bold"),
            ProgressBar(total=self._num_steps, completed=done, width=40),
            Text("  ".join([share, *self._time_left()])),
        )
        return Group(row, Text("  ".join(self._figures()), style="cyan"))

    def _figures(self) -> list[str]:
        return [format_figure(name, values) for name, values in self._latest.items() if values]

    def _time_left(self) -> list[str]:
        if len(self._finished) < 2 or self._steps_done() >= self._num_steps:
            return []
        (first_s, first), (last_s, last) = self._finished[0], self._finished[-1]
        seconds = (last_s - first_s) / (last - first) * (self._num_steps - last)
        minutes, seconds = divmod(round(seconds), 60)
        hours, minutes = divmod(minutes, 60)
        return [
            f"{hours}:{minutes:02}:{seconds:02} left" if hours else f"{minutes}:{seconds:02} left"
        ]


def _validation_line(record: MetricRecord) -> str:
    """Write what held-out rows said of a weight version or step, their data sets in brackets."""
    sets = [f"{name} {value:.3f}" for name, value in of_data_sets(record.values).items()]
    if "loss" in record.values:
        said = f"validation loss after step {record.step + 1}: {record.values['loss']:.3f}"
    else:
        mean = record.values.get("reward", float("nan"))
        said = f"held-out reward at version {record.step}: {mean:.3f}"
    return said + (f" ({', '.join(sets)})" if sets else "")


def format_figure(name: str, values: Mapping[str, float]) -> str:
    """Write one figure as a person reads it: the mean over replicas, with its unit.

    The unit is the ending of the name: ``_share`` in percent, ``_s`` in seconds.
    """
    role, _, measure = name.partition("/")
    mean = sum(values.values()) / len(values)
    text = f"{mean:.3g}"
    if measure.endswith("_share"):
        measure, text = measure.removesuffix("_share"), f"{100 * mean:.0f}%"
    elif measure.endswith("_s"):
        measure, text = measure.removesuffix("_s"), f"{mean:.3g} s"
    words = measure.replace("_", " ").replace("/", " ")
    # What the controller says is about the whole run, and a loss can only be the policy's.
    owner = "" if role == "controller" or measure == "loss" else f"{role} "
    return f"{owner}{words} {text}"
