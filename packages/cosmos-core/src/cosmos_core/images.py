"""Pictures among messages: what a row of data says of them, and the pictures themselves.

Rows name pictures in several ways; here each becomes a *reference*, a text that any process can
read: the absolute path of a file, or a ``data:`` URL that holds the picture. Messages keep a mark
in each picture's place, which the chat template turns into tokens.

    {"role": "user", "content": [{"type": "image", "image": "1.png"}, {"type": "text", ...}]}
        -> {"role": "user", "content": [{"type": "image"}, {"type": "text", ...}]}, ("/data/1.png",)
"""

import base64
import binascii
import io
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import unquote, urlsplit

from cosmos_core.errors import CosmosError

if TYPE_CHECKING:
    from PIL import Image

# Any: what a chat template takes, of which role and content are looked at
Message = dict[str, Any]
_SOURCES = ("image", "path", "url", "image_url", "base64")
_NO_NETWORK = ("http", "https", "s3", "gs")
_ORIENTATION = 0x0112  # of EXIF
_PNG_BEGINS = b"\x89PNG\r\n\x1a\n"
_TELLING = (b"Raw profile type", b"XML:com.adobe.xmp")  # texts that hold EXIF
_LYING = 5  # from this orientation on, rows are columns


class ImageError(CosmosError, ValueError):
    """Raised for a picture that cannot be read, and for messages that name pictures wrongly."""


def with_images(
    messages: Sequence[Mapping[str, Any]], images: Sequence[object] = (), *, folder: Path
) -> tuple[tuple[Message, ...], tuple[str, ...]]:
    """Take the pictures out of a conversation.

    A message's content is a text, or a list of parts: ``{"type": "text", "text": ...}`` and
    ``{"type": "image"}``, the latter with its source under ``image``, ``path``, ``url``,
    ``image_url`` (as OpenAI has it) or ``base64``; without a source it takes the next of
    ``images``. Pictures of ``images`` that no part asks for stand before the first user's text.

    Args:
        messages: role, content, and whatever else the chat template knows.
        images: the row's other pictures. A source is a path, a ``file:`` or ``data:`` URL, bytes,
            a dictionary of ``bytes`` and ``path`` as Parquet files have it, or a PIL image.
        folder: paths are relative to it.

    Returns:
        Messages whose parts are texts and bare marks, and one reference for each mark, in order.

    Raises:
        ImageError: naming the message and the part.
    """
    waiting = [reference_of(source, folder) for source in images]
    found: list[str] = []
    plain: list[Message] = []
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ImageError(f"message {number} is {type(message).__name__}, not a dictionary")
        content = message.get("content")
        if isinstance(content, list):
            parts = _parts(cast("list[object]", content), f"message {number}", folder)
            for part, source in parts:
                if part["type"] == "image":
                    found.append(source or _next(waiting, f"message {number}"))
            content = [part for part, _ in parts]
        plain.append({**message, "content": content})
    if waiting:
        _put_first(plain, len(waiting))
        found = _in_front(plain, found, waiting)
    return tuple(plain), tuple(found)


def text_of(content: object) -> str:
    """Return the text of a message's content; of several parts the texts, joined."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return ""
    parts = cast("list[Mapping[str, Any]]", content)
    return "".join(part["text"] for part in parts if part.get("type") == "text")


def reference_of(source: object, folder: Path) -> str:
    """Return the reference of a picture that a row names in one of several ways.

    Args:
        source: a path, a ``file:`` or ``data:`` URL, bytes, a dictionary with ``bytes``, ``path``
            or ``url``, or a PIL image.
        folder: a path is relative to it.

    Raises:
        ImageError: if it is none of these, or lies behind a network.
    """
    if isinstance(source, Mapping):
        named = cast("Mapping[str, Any]", source)
        inner = next((named[key] for key in ("bytes", "path", "url") if named.get(key)), None)
        if inner is None:
            raise ImageError(f"a picture has neither bytes nor path: {sorted(named)}")
        return reference_of(inner, folder)
    if isinstance(source, bytes):
        return _data_url(source)
    if isinstance(source, Path):
        return str((folder / source).resolve())
    if not isinstance(source, str):
        return _data_url(_png(source))
    scheme = urlsplit(source).scheme if ":" in source[:8] else ""
    if scheme in _NO_NETWORK:
        raise ImageError(
            f"the picture {source[:80]!r} lies behind a network, and a run reads from none: "
            "download it and name the file"
        )
    if scheme == "data":
        return source
    path = unquote(urlsplit(source).path) if scheme == "file" else source
    return str((folder / path).resolve())


def read_image(reference: str) -> "Image.Image":
    """Return a picture as RGB, upright; what is transparent is white.

    Raises:
        ImageError: naming the reference, if there is no picture that can be read.
    """
    with _opened(io.BytesIO(image_bytes(reference)), reference) as picture:
        from PIL import Image, ImageOps

        upright = ImageOps.exif_transpose(picture)
        if upright.mode == "P" or "A" in upright.getbands():
            seen = upright.convert("RGBA")
            upright = Image.alpha_composite(Image.new("RGBA", seen.size, "white"), seen)
        return upright.convert("RGB")


def image_size(reference: str) -> tuple[int, int]:
    """Return height and width in pixels, as `read_image` gives them; reads no pixels.

    Raises:
        ImageError: as `read_image`.
    """
    inside = reference.startswith("data:")
    file = io.BytesIO(image_bytes(reference)) if inside else Path(reference)
    with _opened(file, reference) as picture:
        width, height = picture.size
        if picture.format == "PNG" and _says_nothing(file):
            return height, width
        turned = picture.getexif().get(_ORIENTATION, 1) >= _LYING
        return (width, height) if turned else (height, width)


def _says_nothing(file: io.BytesIO | Path) -> bool:
    """Whether a PNG lacks words on its orientation, which Pillow would read all pixels to know.

    They may follow the pixels: each chunk is its length, its name, so many bytes, and a sum.
    """
    with file.open("rb") if isinstance(file, Path) else io.BytesIO(file.getbuffer()) as stream:
        stream.seek(len(_PNG_BEGINS))
        while len(head := stream.read(8)) == 8:  # length and name
            begin, length = stream.tell(), int.from_bytes(head[:4], "big")
            is_text = head[4:] in (b"tEXt", b"zTXt", b"iTXt")
            if head[4:] == b"eXIf" or (is_text and stream.read(32).startswith(_TELLING)):
                return False
            stream.seek(begin + length + 4)
    return True


def image_bytes(reference: str) -> bytes:
    """Return the file of a picture as it is.

    Raises:
        ImageError: if it cannot be read.
    """
    if reference.startswith("data:"):
        head, comma, data = reference.partition(",")
        try:
            if not comma or not head.endswith(";base64"):
                raise ImageError(f"a data URL of a picture is base64, found {reference[:40]!r}")
            return base64.b64decode(data, validate=True)
        except binascii.Error as error:
            raise ImageError(f"{_short(reference)}: not base64: {error}") from error
    try:
        return Path(reference).read_bytes()
    except OSError as error:
        raise ImageError(f"cannot read the picture {reference}: {error.strerror}") from error


@contextmanager
def _opened(file: io.BytesIO | Path, reference: str) -> "Generator[Image.Image]":
    """Open a picture; what is wrong with it is an `ImageError` that names it."""
    try:
        from PIL import Image
    except ImportError as error:
        raise ImageError("reading pictures needs 'pip install pillow'") from error
    try:
        with Image.open(file) as picture:
            yield picture
    except FileNotFoundError as error:
        raise ImageError(f"cannot read the picture {reference}: {error.strerror}") from error
    except (OSError, SyntaxError, Image.DecompressionBombError) as error:
        # PIL's own words name the file, or an address in memory
        raise ImageError(f"{_short(reference)} is no picture that can be read: {error}") from error


def _parts(content: Sequence[object], where: str, folder: Path) -> list[tuple[Message, str]]:
    """Return each part as templates take it, and the reference of a picture that has its own."""
    found: list[tuple[Message, str]] = []
    for number, part in enumerate(content):
        if not isinstance(part, Mapping):
            raise ImageError(f"{where}, part {number}: is {type(part).__name__}, not a dictionary")
        known = {key: value for key, value in cast("Mapping[str, Any]", part).items() if value}
        kind = known.get("type")
        if kind == "text" or (kind is None and "text" in known):
            text = known.get("text", "")
            if not isinstance(text, str):
                raise ImageError(f"{where}, part {number}: its text is {type(text).__name__}")
            found.append(({"type": "text", "text": text}, ""))
        elif kind in ("image", "image_url") or (kind is None and "image" in known):
            found.append(({"type": "image"}, _source(known, folder)))
        else:
            raise ImageError(
                f"{where}, part {number}: type {kind!r} is not known; parts are of type 'text' or "
                "'image'"
            )
    return found


def _source(part: Mapping[str, Any], folder: Path) -> str:
    name = next((name for name in _SOURCES if name in part), None)
    if name is None:
        return ""
    value = part[name]
    return reference_of(f"data:;base64,{value}" if name == "base64" else value, folder)


def _next(waiting: list[str], where: str) -> str:
    if not waiting:
        raise ImageError(f"{where}: has a picture without a source, and the row has no further one")
    return waiting.pop(0)


def _put_first(messages: list[Message], count: int) -> None:
    """Put marks before what the user says first."""
    at = next((i for i, message in enumerate(messages) if message.get("role") == "user"), None)
    if at is None:
        raise ImageError(f"{count} pictures, and no message of the user to put them before")
    content = messages[at]["content"]
    rest = content if isinstance(content, list) else [{"type": "text", "text": content or ""}]
    marks = [{"type": "image"} for _ in range(count)]
    messages[at] = {**messages[at], "content": [*marks, *cast("list[Message]", rest)]}


def _in_front(messages: list[Message], found: list[str], first: list[str]) -> list[str]:
    """Return references in the order of their marks: ``first`` stands where the user begins."""
    before = 0
    for message in messages:
        if message.get("role") == "user":
            break
        content = message.get("content")
        if isinstance(content, list):
            before += sum(part["type"] == "image" for part in cast("list[Message]", content))
    return [*found[:before], *first, *found[before:]]


def _data_url(data: bytes) -> str:
    return f"data:;base64,{base64.b64encode(data).decode('ascii')}"


def _png(picture: object) -> bytes:
    save = getattr(picture, "save", None)
    if save is None:
        raise ImageError(f"a picture is a path, a URL or bytes, found {type(picture).__name__}")
    buffer = io.BytesIO()
    save(buffer, format="PNG")
    return buffer.getvalue()


def _short(reference: str) -> str:
    return f"the picture {reference if len(reference) < 200 else reference[:40] + '...'}"
