"""The routes of a service of rewards; none of them answers without the token."""

from collections.abc import Iterable, Mapping

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.types import ASGIApp

from cosmos_app.dashboard.gate import TokenGate
from cosmos_app.dashboard.prometheus import RefusalCollector
from cosmos_app.http_bodies import LATER, read_body, refusal
from cosmos_app.reward_service.wanted import Wanted
from cosmos_rollout import Failure, RewardPool, RewardRequestError, sample_from_json

ROUTE = "/score"
_MOST_BYTES = 64 << 20  # pictures may be part of a sample's row


def make_app(pool: RewardPool, weights: Mapping[str, float], token: str) -> ASGIApp:
    """Return the application.

    Args:
        pool: computes rewards; it is started and ended by somebody else.
        weights: of its rewards, by name.
        token: what requests have to show, before anything of them is read.
    """
    app = FastAPI(title="cosmos-app reward-service", version="1", docs_url=None, redoc_url=None)
    gate = TokenGate(app, token)
    wanted = Wanted(pool)

    @app.post(ROUTE, summary="The reward of a sample: JSON with the fields of RewardInput")
    async def score(request: Request) -> Response:
        body = await read_body(request, _MOST_BYTES)
        if body is None:
            return refusal(413, f"the body has more than {_MOST_BYTES} bytes")
        try:
            sample = sample_from_json(body)
        except RewardRequestError as error:
            return refusal(422, str(error))
        outcome = await wanted.score(sample, request)
        if outcome is None:
            return refusal(503, "the service ends", LATER)
        if isinstance(outcome, Failure):
            return refusal(500, str(outcome))  # another try would fail likewise
        return JSONResponse({"reward": outcome.total, "rewards": dict(outcome.rewards)})

    @app.get(ROUTE, summary="That the service is there, and the weights of its rewards")
    async def told() -> dict[str, object]:
        return {"rewards": dict(weights)}

    @app.get("/metrics", summary="Figures for Prometheus")
    async def metrics() -> Response:
        registry = CollectorRegistry(auto_describe=False)
        registry.register(_PoolCollector(pool, wanted))
        registry.register(RefusalCollector(gate.num_refused))
        return Response(generate_latest(registry), media_type="text/plain; version=0.0.4")

    _ = (score, told, metrics)
    return gate


class _PoolCollector(Collector):
    def __init__(self, pool: RewardPool, wanted: Wanted) -> None:
        self._pool = pool
        self._wanted = wanted

    def collect(self) -> Iterable[Metric]:
        """Return every family."""
        yield GaugeMetricFamily(
            "cosmos_reward_requests_open", "Requests not yet answered.", self._wanted.num_open
        )
        yield CounterMetricFamily(
            "cosmos_reward_samples", "Samples that got their reward.", self._pool.num_scored
        )
        failed = CounterMetricFamily(
            "cosmos_reward_failures", "Samples without a reward.", labels=["reward", "error"]
        )
        for what, count in self._pool.failures.items():
            reward, _, error = what.rpartition(": ")
            failed.add_metric([reward, error], count)
        yield failed
