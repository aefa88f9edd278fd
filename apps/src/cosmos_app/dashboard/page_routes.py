"""What the pages of all kinds of runs have in common: their files, and answers of nothing new."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastapi import Depends, FastAPI, Response
from fastapi.responses import FileResponse
from fastapi.security import HTTPBearer

_PAGE = Path(__file__).parent / "page"
_TYPES = {
    "index.html": "text/html",
    "world_model.html": "text/html",
    "dashboard.css": "text/css",
    "dashboard.js": "text/javascript",
    "world_model.js": "text/javascript",
    "asking.js": "text/javascript",
    "charts.js": "text/javascript",
    "icon.svg": "image/svg+xml",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class ProblemView:
    """Why a request has not been done."""

    detail: str


def described(status: int, description: str, *kinds: str) -> dict[int | str, dict[str, Any]]:
    """Describe the answers with a status, for ``responses`` of a route.

    Args:
        status: its code.
        description: when they are given.
        kinds: types of their content; without any they are a `ProblemView`.
    """
    if not kinds:
        return {status: {"description": description, "model": ProblemView}}
    text: Mapping[str, Any] = {"schema": {"type": "string"}}
    return {status: {"description": description, "content": dict.fromkeys(kinds, text)}}


FOR_PROMETHEUS = described(200, "Figures", "text/plain")


def new_api() -> FastAPI:
    """Return an application without routes, described at ``/api``."""
    bearer = HTTPBearer(auto_error=False, description="Of the run; a browser has it as a cookie.")
    return FastAPI(
        dependencies=[Depends(bearer)],
        responses=described(401, "The token is wrong or missing", "text/plain"),
        title="cosmos-app",
        description="What a run is doing. Send 'Authorization: Bearer TOKEN' with each request.",
        version="1",
        openapi_url="/api",
        docs_url=None,
        redoc_url=None,
    )


def add_page_files(app: FastAPI, first: str) -> None:
    """Serve the files of the page, the ``first`` at ``/``, and answers of nothing new."""

    @app.exception_handler(_NotModifiedError)
    async def not_modified(request: object, error: Exception) -> Response:
        del request
        return Response(status_code=304, headers={"etag": str(error)})

    @app.get("/", include_in_schema=False)
    async def index() -> FileResponse:
        return FileResponse(_PAGE / first, media_type="text/html")

    @app.get("/page/{name}", include_in_schema=False)
    async def part(name: str) -> Response:
        if name not in _TYPES:
            return Response("There is no such file.\n", status_code=404, media_type="text/plain")
        return FileResponse(_PAGE / name, media_type=_TYPES[name])


def answer_unless_known(tag: str, if_none_match: str | None, response: Response) -> None:
    """Mark a response with its tag, or answer at once that nothing is new since that tag.

    Of applications with `add_page_files`.
    """
    response.headers["etag"] = tag
    if if_none_match == tag:
        raise _NotModifiedError(tag)


class _NotModifiedError(Exception):
    """Raised to answer that nothing is new; holds the tag."""
