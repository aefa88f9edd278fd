"""Colours of pictures and videos as viewers show them: ICC profiles, and matrices nobody named."""

import io
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from av.video.frame import VideoFrame
    from PIL import Image

_UNNAMED, _BT709, _BT2020 = 2, 1, 9
"""Numbers of matrices, and the last of primaries, in ITU-T H.273, as PyAV gives them."""
_SD_LINES, _HD_COLUMNS = 576, 1280
_SPACE = slice(16, 20)
_SPACES = {"L": b"GRAY", "RGB": b"RGB ", "CMYK": b"CMYK"}
"""The colour space that a profile names in these bytes of its header, for each mode of Pillow's."""


def name_matrix(frame: "VideoFrame") -> None:
    """Name the matrix of a decoded frame whose file names none, as players guess it.

    BT.2020 where the primaries are, BT.709 of more than 576 lines or from 1280 columns on (films
    are cut to 1280x536). FFmpeg takes what is left, and without this everything, as BT.601.
    """
    if frame.colorspace != _UNNAMED or frame.format.is_rgb:
        return
    if frame.color_primaries == _BT2020:
        frame.colorspace = _BT2020
    elif frame.height > _SD_LINES or frame.width >= _HD_COLUMNS:
        frame.colorspace = _BT709


def in_srgb(picture: "Image.Image", profile: bytes | None) -> "Image.Image":
    """Return a picture in sRGB by an ICC profile; as it is where that cannot be applied.

    A profile that is damaged, or made for other colours than the picture has (of red, green and
    blue for one of greys), is passed over, as browsers do.

    Args:
        picture: of 8 bits, of any mode; its transparency stays.
        profile: the bytes that Pillow calls ``icc_profile``.
    """
    from PIL import ImageCms

    if not profile:
        return picture
    colours = _without_palette(picture)
    alpha = colours.getchannel("A") if "A" in colours.getbands() else None
    plain = colours.convert({"LA": "L", "RGBA": "RGB"}[colours.mode]) if alpha else colours
    if profile[_SPACE] != _SPACES.get(plain.mode):
        return picture
    try:
        source = ImageCms.ImageCmsProfile(io.BytesIO(profile))
        shown = ImageCms.profileToProfile(
            plain, source, ImageCms.createProfile("sRGB"), outputMode="RGB"
        )
    except (ImageCms.PyCMSError, OSError):
        return picture
    if shown is None:  # only of pictures that are changed in place
        return picture
    if alpha:
        shown.putalpha(alpha)
    return shown


def _without_palette(picture: "Image.Image") -> "Image.Image":
    """Return a picture with its colours instead of their numbers, and its transparency, if any."""
    if picture.has_transparency_data:
        return picture.convert("LA" if picture.mode in ("L", "LA") else "RGBA")
    return picture.convert("RGB") if picture.mode == "P" else picture
