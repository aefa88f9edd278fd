"""The routes of the reward service; none of them answers without the token."""

from collections.abc import Iterable
from urllib.parse import parse_qs

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.types import ASGIApp

from cosmos_app.dashboard.gate import TokenGate
from cosmos_app.dashboard.prometheus import RefusalCollector
from cosmos_app.http_bodies import LATER, read_body, refusal
from cosmos_app.wfm.reward_service.config import RewardServerConfig
from cosmos_app.wfm.reward_service.queue import QueueFullError, RewardQueue, UnknownRequestError
from cosmos_wfm import RewardRequestError, parse_request

_MOST_FORM_BYTES = 4096


def make_app(queue: RewardQueue, config: RewardServerConfig, token: str) -> ASGIApp:
    """Return the application.

    Args:
        queue: where requests go; somebody has to have it ``work``.
        config: limits, and how long an answer is waited for.
        token: what requests have to show, before anything of them is read.
    """
    app = FastAPI(title="cosmos-app reward-service", version="1", docs_url=None, redoc_url=None)
    gate = TokenGate(app, token)

    @app.post("/enqueue", summary="Samples to be scored: a line of JSON, then an array")
    async def enqueue(request: Request) -> Response:
        body = await read_body(request, config.max_request_bytes)
        if body is None:
            return refusal(413, f"the body has more than {config.max_request_bytes} bytes")
        try:
            return JSONResponse({"uuid": queue.enqueue(body, parse_request(body))})
        except (RewardRequestError, UnknownRequestError) as error:
            return refusal(422, str(error))
        except QueueFullError as error:
            return refusal(503, str(error), LATER)

    @app.post("/pull", summary="Scores of a request: form fields uuid and type")
    async def pull(request: Request) -> Response:
        body = await read_body(request, _MOST_FORM_BYTES)
        form = parse_qs((body or b"").decode("utf-8", "replace"))
        ticket, name = (form.get(field, [""])[-1] for field in ("uuid", "type"))
        try:
            answer = await queue.answer(ticket, name, config.hold_s)
        except UnknownRequestError as error:
            return refusal(404, str(error))
        if answer is None:
            return refusal(config.not_ready_status, "not scored yet", LATER)
        return JSONResponse(answer, 500 if "error" in answer else 200)

    @app.get("/ping", summary="That the service is there, and what it serves")
    async def ping() -> dict[str, object]:
        processes = queue.processes.values()
        return {"rewards": {process.name: process.pid for process in processes}}

    @app.get("/metrics", summary="Figures for Prometheus")
    async def metrics() -> Response:
        registry = CollectorRegistry(auto_describe=False)
        registry.register(_QueueCollector(queue))
        registry.register(RefusalCollector(gate.num_refused))
        return Response(generate_latest(registry), media_type="text/plain; version=0.0.4")

    _ = (enqueue, pull, ping, metrics)
    return gate


class _QueueCollector(Collector):
    def __init__(self, queue: RewardQueue) -> None:
        self._queue = queue

    def collect(self) -> Iterable[Metric]:
        """Return every family."""
        queue, figures = self._queue, self._queue.figures
        waiting = GaugeMetricFamily(
            "cosmos_reward_requests_open", "Requests not yet answered.", labels=["reward"]
        )
        starts = CounterMetricFamily(
            "cosmos_reward_process_starts", "Processes that were started.", labels=["reward"]
        )
        samples = CounterMetricFamily(
            "cosmos_reward_samples", "Samples that were scored.", labels=["reward"]
        )
        failed = CounterMetricFamily(
            "cosmos_reward_failures", "Requests that ended in an error.", labels=["reward"]
        )
        seconds = CounterMetricFamily(
            "cosmos_reward_busy_seconds", "Seconds spent on scoring.", labels=["reward"]
        )
        for name, process in queue.processes.items():
            waiting.add_metric([name], queue.num_open(name))
            starts.add_metric([name], process.num_starts)
            samples.add_metric([name], figures.samples[name])
            failed.add_metric([name], figures.failed[name])
            seconds.add_metric([name], figures.seconds.get(name, 0.0))
        yield from (waiting, starts, samples, failed, seconds)
        yield CounterMetricFamily(
            "cosmos_reward_requests_refused",
            "Requests for which there was no room.",
            figures.refused,
        )
