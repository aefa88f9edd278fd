"""A simulated transfer as a picture: a bar for everything that a receiver takes in."""

from collections.abc import Sequence
from pathlib import Path

from cosmos_weightsync.errors import ConfigurationError
from cosmos_weightsync.simulation import Failure, Simulation

__all__ = ["draw_timeline"]

_MAX_ROWS = 256
_COLOURS = {"sender": "#4477aa", "relay": "#ee8866"}


def draw_timeline(
    found: Simulation, path: Path, *, bound_s: float, failures: Sequence[Failure]
) -> None:
    """Write the picture; its format is that of the file's name.

    Raises:
        ConfigurationError: matplotlib is not installed, or the file cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigurationError(
            'a figure needs matplotlib: pip install "cosmos-weightsync[figure]", or leave --figure '
            "out and see the timeline as text"
        ) from error
    ranks = found.sample(_MAX_ROWS)
    rows = {rank: row for row, rank in enumerate(ranks)}
    figure = Figure(figsize=(9, min(12, 1.6 + 0.22 * len(ranks))), layout="constrained")
    axes = figure.subplots()
    for kind, colour in _COLOURS.items():
        bars = [
            (rows[span.receiver], span.start_s, min(span.end_s, found.end_s) - span.start_s)
            for span in found.spans
            if span.receiver in rows and (span.source >= found.num_senders) == (kind == "relay")
        ]
        if bars:
            y, left, width = zip(*bars, strict=True)
            label = "from a receiver" if kind == "relay" else "from a sender"
            axes.barh(y, width, left=left, height=0.8, color=colour, alpha=0.6, label=label)
    axes.axvline(bound_s, color="black", linestyle=":", label="bound")
    for number, failure in enumerate(failures):
        label = "a death" if number == 0 else None
        axes.axvline(failure.at_s, color="#cc3311", linewidth=1, label=label)
    axes.set(xlabel="seconds", ylabel="receiver rank", xlim=(0, None))
    axes.set_yticks(list(rows.values())[:: max(1, len(ranks) // 16)])
    axes.set_yticklabels([str(rank) for rank in ranks][:: max(1, len(ranks) // 16)])
    axes.invert_yaxis()
    figure.legend(loc="outside upper center", ncols=4, frameon=False)
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{path}: {error}") from error
