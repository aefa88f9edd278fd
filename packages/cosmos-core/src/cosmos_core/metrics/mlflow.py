"""Metric records as an MLflow run, through MLflow's own client."""

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

# MLflow asks for versions that do not go with ours, so it is not where types are checked.
from mlflow.entities import (  # pyright: ignore[reportMissingImports]
    Metric,
    Param,
    RunStatus,
)
from mlflow.tracking import MlflowClient  # pyright: ignore[reportMissingImports]

from cosmos_core.metrics.batches import Batches
from cosmos_core.metrics.record import MediaRecord, MetricRecord

_MOST_AT_ONCE = 500
_MOST_PARAMS = 100
_LONGEST_PARAM = 250
_MS = 1000


class MlflowSink:
    """Logs ``replica/name`` values at their step and time; the resolved recipe becomes parameters.

    Points are handed on in batches of one request, at the latest when the sink is closed.
    """

    def __init__(
        self, uri: str, *, experiment: str, name: str, config: Mapping[str, Any], batch: int
    ) -> None:
        self._client = MlflowClient(tracking_uri=uri)
        found = self._client.get_experiment_by_name(experiment)
        wanted = (
            self._client.create_experiment(experiment) if found is None else found.experiment_id
        )
        run = self._client.create_run(wanted, tags={"mlflow.runName": name})
        self._run_id: str | None = run.info.run_id
        self._waiting = Batches[Metric](
            functools.partial(self._send, run.info.run_id),
            enough=min(batch, _MOST_AT_ONCE),
            most=_MOST_AT_ONCE,
        )
        params = [Param(key, value[:_LONGEST_PARAM]) for key, value in _flat("", config)]
        for start in range(0, len(params), _MOST_PARAMS):
            self._client.log_batch(run.info.run_id, params=params[start : start + _MOST_PARAMS])

    def write(self, record: MetricRecord) -> None:
        """Queue the record's values, and send them all if there are enough.

        Raises:
            MlflowException: if the server takes none; what waits is sent with what follows.
        """
        if self._run_id is None:
            raise ValueError("the MLflow run is closed")
        moment = int(record.time_s * _MS)
        self._waiting.add(
            [
                Metric(f"{record.replica}/{name}", value, moment, record.step)
                for name, value in record.values.items()
            ]
        )

    def show(self, media: MediaRecord) -> None:
        """Send the files as artifacts under ``replica/name/step_<N>``."""
        if self._run_id is None:
            raise ValueError("the MLflow run is closed")
        for path in media.files:
            place = f"{media.replica}/{media.name}/step_{media.step}"
            self._client.log_artifact(self._run_id, str(path), place)

    def close(self) -> None:
        """Send what is left and end the run."""
        if self._run_id is not None:
            self._waiting.flush()
            self._client.set_terminated(self._run_id, RunStatus.to_string(RunStatus.FINISHED))
            self._run_id = None

    def _send(self, run_id: str, metrics: Sequence[Any]) -> None:
        self._client.log_batch(run_id, metrics=metrics)


def _flat(prefix: str, table: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _flat(f"{prefix}{key}.", value)
        else:
            yield f"{prefix}{key}", str(value)
