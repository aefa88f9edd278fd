"""Bodies of requests that are not read beyond a size, and answers that say what is wrong."""

from fastapi import Request, Response
from fastapi.responses import JSONResponse

LATER = {"Retry-After": "1"}


async def read_body(request: Request, most: int) -> bytes | None:
    """Return a body, or ``None`` as soon as it is seen to be too large."""
    parts: list[bytes] = []
    size = 0
    async for part in request.stream():
        size += len(part)
        if size > most:
            return None
        parts.append(part)
    return b"".join(parts)


def refusal(status: int, message: str, headers: dict[str, str] | None = None) -> Response:
    """Return an answer that is an error, with its words."""
    return JSONResponse({"error": message}, status, headers)
