"""The HTTP API of a world model's run: how it stands, its curves, its validation samples."""

from collections.abc import Iterable
from typing import Annotated

from fastapi import FastAPI, Header, HTTPException, Path, Response
from fastapi.responses import FileResponse
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.types import ASGIApp

from cosmos_app.dashboard.gate import TokenGate
from cosmos_app.dashboard.page_routes import (
    FOR_PROMETHEUS,
    add_page_files,
    answer_unless_known,
    described,
    new_api,
)
from cosmos_app.dashboard.prometheus import RefusalCollector
from cosmos_app.wfm.dashboard.feed import WorldModelFeed
from cosmos_app.wfm.dashboard.galleries import MEDIA_TYPES
from cosmos_app.wfm.dashboard.view import (
    StepsView,
    ValidationView,
    WorldModelPageView,
    WorldModelRunView,
    gallery_view,
    step_curves,
    world_model_page_view,
    world_model_run_view,
)

_KINDS = tuple(dict.fromkeys(MEDIA_TYPES.values()))

Step = Annotated[int, Path(ge=0, description="Of the validation.")]


def make_world_model_app(feed: WorldModelFeed, token: str) -> ASGIApp:
    """Return the application; nothing of it answers without the token."""
    app = new_api()
    gate = TokenGate(app, token)
    add_page_files(app, "world_model.html")
    _add_run_routes(app, feed, gate)
    _add_gallery_routes(app, feed)
    return gate


def _add_run_routes(app: FastAPI, feed: WorldModelFeed, gate: TokenGate) -> None:
    @app.get("/api/run", summary="How the run stands")
    async def run() -> WorldModelRunView:
        return world_model_run_view(feed)

    @app.get("/api/curves", summary="Every figure by step")
    async def curves() -> list[StepsView]:
        return step_curves(feed)

    @app.get(
        "/api/page",
        summary="All of the page but the gallery",
        responses={304: {"description": "Nothing is new"}},
    )
    async def page(
        response: Response, if_none_match: Annotated[str | None, Header()] = None
    ) -> WorldModelPageView:
        answer_unless_known(f'"{feed.revision}"', if_none_match, response)
        return world_model_page_view(feed)

    @app.get(
        "/metrics",
        summary="For Prometheus",
        response_class=Response,
        responses=FOR_PROMETHEUS,
    )
    async def metrics() -> Response:
        registry = CollectorRegistry(auto_describe=False)
        registry.register(_FeedCollector(feed))
        registry.register(RefusalCollector(gate.num_refused))
        kind = "text/plain; version=0.0.4; charset=utf-8"
        return Response(generate_latest(registry), media_type=kind)


def _add_gallery_routes(app: FastAPI, feed: WorldModelFeed) -> None:
    @app.get("/api/gallery", summary="The samples of every validation, with their rewards")
    async def gallery() -> list[ValidationView]:
        return gallery_view(feed)

    @app.get(
        "/api/gallery/{step}/{name:path}",
        summary="A picture or video that the index of a validation names",
        response_class=FileResponse,
        responses={
            **described(200, "The file", *_KINDS),
            **described(206, "The part of it that was asked for", *_KINDS),
            **described(404, "No sample of this validation has it"),
            **described(400, "The header Range asks for no part", "text/plain"),
            **described(416, "It has no such part", "text/plain"),
        },
    )
    async def media(step: Step, name: str) -> FileResponse:
        path = feed.galleries.file_of(step, name)
        if path is None:
            raise HTTPException(404, "no sample of this validation has this file")
        return FileResponse(path, media_type=MEDIA_TYPES[path.suffix])


class _FeedCollector(Collector):
    """The newest figures of a run."""

    def __init__(self, feed: WorldModelFeed) -> None:
        self._feed = feed

    def collect(self) -> Iterable[Metric]:
        """Return every family."""
        run = world_model_run_view(self._feed)
        yield GaugeMetricFamily("cosmos_run_up", "1 while the run runs.", run.state == "running")
        yield GaugeMetricFamily("cosmos_step", "Optimizer steps done.", run.step)
        yield GaugeMetricFamily("cosmos_steps_planned", "Optimizer steps in all.", run.num_steps)
        figures = GaugeMetricFamily(
            "cosmos_measurement", "The newest value of each figure.", labels=["name"]
        )
        for name, curve in self._feed.curves.items():
            if curve.newest is not None:
                figures.add_metric([name], curve.newest.value)
        yield figures
