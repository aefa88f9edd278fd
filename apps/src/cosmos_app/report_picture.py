"""A run's report as a picture."""

from pathlib import Path

from cosmos_app.report import RunReport


def draw_report(report: RunReport, path: Path) -> None:
    """Write a picture of the rewards of training and of held-out rows as PNG."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    axes.plot(report.rewards, label="training reward", linewidth=1)
    versions = sorted(report.accuracies)
    held_out = [report.accuracies[version] for version in versions]
    axes.plot(versions, held_out, "o-", label="held-out reward")
    for name, by_version in report.data_sets.items():
        axes.plot([*by_version], [*by_version.values()], ".--", label=f"  {name}", linewidth=1)
    axes.set(xlabel="step (weight version)", ylabel="reward")
    if all(0 <= reward <= 1 for reward in (*report.rewards, *held_out)):
        axes.set(ylim=(0, 1))
    axes.legend(loc="lower right")
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
