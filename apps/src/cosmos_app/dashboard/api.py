"""The dashboard's HTTP API: every route wants the token; two ask the controller for something."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Annotated

from fastapi import FastAPI, Header, HTTPException, Query, Response
from starlette.types import ASGIApp

from cosmos_app.dashboard.feed import RunFeed
from cosmos_app.dashboard.gate import TokenGate
from cosmos_app.dashboard.page_routes import (
    FOR_PROMETHEUS,
    add_page_files,
    answer_unless_known,
    described,
    new_api,
)
from cosmos_app.dashboard.pictures import reference_named, thumbnail
from cosmos_app.dashboard.prometheus import exposition
from cosmos_app.dashboard.view import (
    CurveView,
    EventView,
    LaneView,
    PageView,
    ReplicaView,
    RunView,
    SampleView,
    WhichEvents,
    curve_views,
    event_views,
    page_view,
    replica_views,
    run_view,
    sample_views,
    timeline_view,
)
from cosmos_core.bus import BusError
from cosmos_core.images import MediaError
from cosmos_core.messages import Event, ScaleRequested, StopRequested

_WINDOW_S = 120.0
_LONGEST_WINDOW_S = 7 * 24 * 3600.0
_EVENTS_ON_PAGE = 100

Window = Annotated[float, Query(gt=0, le=_LONGEST_WINDOW_S, description="Seconds looked back.")]
Reason = Annotated[str, Query(min_length=1, max_length=200, description="Shown to people.")]
Wanted = Annotated[
    int | None,
    Query(ge=0, le=100_000, description="How many there are to be; as many as there are."),
]
Most = Annotated[int, Query(ge=0, le=1000, description="How many at most.")]


@dataclass(frozen=True, kw_only=True, slots=True)
class Served:
    """What the routes read: the feed, and seconds since the epoch.

    ``send`` tells the controller something; there is none where a run is only replayed.
    """

    feed: RunFeed
    clock: Callable[[], float] = time.time
    send: Callable[[Event], Awaitable[None]] | None = None


def make_app(served: Served, token: str) -> ASGIApp:
    """Return the application; nothing of it answers without the token."""
    app = new_api()
    gate = TokenGate(app, token)
    _add_run_routes(app, served, gate)
    _add_history_routes(app, served)
    _add_page_routes(app, served)
    if served.send is not None:
        _add_control_routes(app, served.send)
    return gate


def _add_run_routes(app: FastAPI, served: Served, gate: TokenGate) -> None:
    feed, clock = served.feed, served.clock

    @app.get("/api/run", summary="How the run stands")
    async def run() -> RunView:
        return run_view(feed, clock())

    @app.get("/api/replicas", summary="The replicas and what each is doing now")
    async def replicas() -> list[ReplicaView]:
        return replica_views(feed)

    @app.get(
        "/metrics",
        summary="For Prometheus",
        response_class=Response,
        responses=FOR_PROMETHEUS,
    )
    async def metrics() -> Response:
        kind = "text/plain; version=0.0.4; charset=utf-8"
        page = exposition(feed, clock(), num_refused=gate.num_refused)
        return Response(page, media_type=kind)


def _add_history_routes(app: FastAPI, served: Served) -> None:
    feed = served.feed

    @app.get("/api/curves", summary="Reward, staleness, throughput, queues, stalls")
    async def curves() -> dict[str, CurveView]:
        return curve_views(feed)

    @app.get("/api/timeline", summary="What each replica did, with its bubbles")
    async def timeline(window_s: Window = _WINDOW_S) -> list[LaneView]:
        return timeline_view(feed, window_s)

    @app.get("/api/samples", summary="Newest samples, in spans of equal weight version")
    async def samples() -> list[SampleView]:
        return sample_views(feed)

    @app.get(
        "/api/pictures/{name}",
        summary="A small copy of a sample's picture",
        response_class=Response,
        responses={
            **described(200, "The copy", "image/jpeg"),
            **described(404, "No sample that is shown has it, or it cannot be read any more"),
        },
    )
    async def picture(name: str) -> Response:
        reference = reference_named(name, feed.samples)
        if reference is None:
            raise HTTPException(404, "no sample that is shown has this picture")
        try:
            copy = await asyncio.to_thread(thumbnail, reference)
        except MediaError as error:
            raise HTTPException(404, "the picture cannot be read any more") from error
        return Response(copy, media_type="image/jpeg")

    @app.get("/api/events", summary="Newest events")
    async def events(most: Most = _EVENTS_ON_PAGE, which: WhichEvents = "all") -> list[EventView]:
        return event_views(feed, most, which=which)


def _add_control_routes(app: FastAPI, told: Callable[[Event], Awaitable[None]]) -> None:
    unheard = described(503, "The controller could not be told")

    async def send(event: Event) -> None:
        try:
            await told(event)
        except BusError as error:
            raise HTTPException(503, str(error)) from error

    @app.post(
        "/api/stop",
        status_code=202,
        summary="End the run cleanly, with a checkpoint",
        responses=unheard,
    )
    async def stop(reason: Reason = "asked by HTTP") -> None:
        await send(StopRequested(reason=reason))

    @app.post(
        "/api/scale",
        status_code=202,
        summary="Ask for a number of replicas",
        responses=unheard,
    )
    async def scale(rollouts: Wanted = None, policies: Wanted = None) -> None:
        wanted = {"rollouts": rollouts, "policies": policies}
        await send(ScaleRequested(**{k: n for k, n in wanted.items() if n is not None}))


def _add_page_routes(app: FastAPI, served: Served) -> None:
    add_page_files(app, "index.html")

    @app.get(
        "/api/page", summary="All of the page", responses={304: {"description": "Nothing is new"}}
    )
    async def page(
        response: Response,
        window_s: Window = _WINDOW_S,
        if_none_match: Annotated[str | None, Header()] = None,
    ) -> PageView:
        view = page_view(
            served.feed,
            now_s=served.clock(),
            window_s=window_s,
            most_events=_EVENTS_ON_PAGE,
        )
        # A controller that falls silent is news although nothing new has been heard.
        tag = f'"{view.revision}-{window_s:g}-{view.run.state}"'
        answer_unless_known(tag, if_none_match, response)
        return view
