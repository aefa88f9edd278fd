"""What the pages of all kinds of runs have in common: their files, and answers of nothing new."""

from pathlib import Path

from fastapi import FastAPI, Response
from fastapi.responses import FileResponse

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


def new_api() -> FastAPI:
    """Return an application without routes, described at ``/api``."""
    return FastAPI(
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
