"""Addresses of servers that are somebody else's, and the token that they want."""

from pathlib import Path


def check_url(url: str) -> None:
    """Refuse an address that no request can be sent to.

    Raises:
        ValueError: saying how it has to begin.
    """
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"url has to begin with http:// or https://, found {url!r}")


def headers_of(key_file: Path | None) -> dict[str, str]:
    """Return the headers with the bearer token that a file holds; none without a file.

    Raises:
        OSError: if the file cannot be read.
    """
    if key_file is None:
        return {}
    return {"Authorization": f"Bearer {key_file.read_text().strip()}"}
