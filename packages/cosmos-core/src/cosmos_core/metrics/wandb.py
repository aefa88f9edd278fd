"""Metric records as a Weights & Biases run."""

from collections.abc import Mapping
from typing import Any, Literal

import wandb

from cosmos_core.metrics.record import MediaRecord, MetricRecord
from cosmos_core.rundir import RunDirectory


class WandbSink:
    """Logs ``replica/name`` values over an axis ``replica/step`` of each replica's own.

    Replicas reach a step at different times, and W&B's built-in step may only grow.
    """

    def __init__(
        self,
        run: RunDirectory,
        *,
        project: str,
        mode: Literal["offline", "online"],
        entity: str | None,
        config: Mapping[str, Any],
    ) -> None:
        # Only the metrics are sent: no code, no git state, no console output.
        settings = wandb.Settings(silent=True, console="off", disable_git=True, disable_code=True)
        self._run: wandb.Run | None = wandb.init(
            project=project,
            entity=entity,
            name=run.name,
            dir=str(run.path),
            mode=mode,
            config=dict(config),
            settings=settings,
        )
        self._axes = set[str]()

    def write(self, record: MetricRecord) -> None:
        """Queue the record."""
        self._log(record.replica, record.step, record.values)

    def show(self, media: MediaRecord) -> None:
        """Queue pictures and videos as ``replica/name/file``."""
        made = {
            f"{media.name}/{path.stem}": wandb.Image(str(path))
            if path.suffix == ".png"
            else wandb.Video(str(path), format="mp4")
            for path in media.files
            if path.suffix in (".png", ".mp4")
        }
        if made:
            self._log(media.replica, media.step, made)

    def close(self) -> None:
        """Finish the run; in online mode this waits for the upload."""
        if self._run is not None:
            self._run.finish()
            self._run = None

    def _log(self, replica: str, step: int, values: Mapping[str, object]) -> None:
        if self._run is None:
            raise ValueError("the W&B run is closed")
        axis = f"{replica}/step"
        if axis not in self._axes:
            self._run.define_metric(axis, hidden=True)
            self._run.define_metric(f"{replica}/*", step_metric=axis)
            self._axes.add(axis)
        self._run.log({**{f"{replica}/{name}": v for name, v in values.items()}, axis: step})
