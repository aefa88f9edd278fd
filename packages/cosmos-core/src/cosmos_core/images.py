"""Pictures by reference: a text that any process can read, and the picture that it names.

A reference is the absolute path of a file, or a ``data:`` URL that holds the picture.
"""

import base64
import binascii
import io
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import unquote, urlsplit

from cosmos_core.colours import in_srgb
from cosmos_core.errors import CosmosError

if TYPE_CHECKING:
    from PIL import Image

_NO_NETWORK = ("http", "https", "s3", "gs")
_ORIENTATION = 0x0112  # of EXIF
_PNG_BEGINS = b"\x89PNG\r\n\x1a\n"
_TELLING = (b"Raw profile type", b"XML:com.adobe.xmp")  # texts that hold EXIF
_LYING = 5  # from this orientation on, rows are columns
_PROGRAMS = ("EPS", "WMF")


class MediaError(CosmosError, ValueError):
    """Raised for pictures and videos that cannot be read, and messages that name them wrongly."""


class ImageError(MediaError):
    """Raised for a picture that cannot be read."""


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
    """Return a picture as sRGB, by its ICC profile, upright; what is transparent is white.

    Raises:
        ImageError: naming the reference, if there is no picture that can be read.
    """
    with _opened(io.BytesIO(image_bytes(reference)), reference) as picture:
        from PIL import Image, ImageOps

        upright = in_srgb(ImageOps.exif_transpose(picture), picture.info.get("icc_profile"))
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
            refuse_programs(picture.format)
            yield picture
    except FileNotFoundError as error:
        raise ImageError(f"cannot read the picture {reference}: {error.strerror}") from error
    except (OSError, SyntaxError, Image.DecompressionBombError, _ProgramError) as error:
        # PIL's own words name the file, or an address in memory
        raise ImageError(f"{_short(reference)} is no picture that can be read: {error}") from error


def refuse_programs(kind: str | None) -> None:
    """Refuse what PIL has another program draw: PostScript is run by Ghostscript, if that is there.

    Args:
        kind: the format that PIL found, whatever a file is called.

    Raises:
        ImageError: if it is such a format.
    """
    if kind in _PROGRAMS:
        raise _ProgramError(f"{kind} is a program that would be run to draw it; save it as PNG")


class _ProgramError(ImageError):
    """Raised for a picture that a program would draw; `_opened` says which picture it is."""


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
