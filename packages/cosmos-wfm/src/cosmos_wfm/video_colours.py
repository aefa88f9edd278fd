"""Colours of HDR and wide-gamut videos, made those of standard ones (ITU-R BT.709).

A video of BT.2100 (PQ or HLG; phones and televisions film it) that is taken as it is stored looks
washed out. FFmpeg's swscale does what players do, tone mapping and gamut mapping; it takes seconds
to get ready for each video. So it is asked once about a grid of colours, and frames are looked up.
"""

import importlib
from fractions import Fraction
from functools import lru_cache
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageFilter

from cosmos_core.colours import name_matrix

_PQ, _HLG, _STANDARD = 16, 18, 14
_BT2020, _DISPLAY_P3 = 9, 12
"""Numbers of transfer characteristics and of primaries in ITU-T H.273, as PyAV gives them."""

_GRID = 33
"""Steps of a colour component."""
_PEAK_NITS = 1000.0
_HLG_GAMMA = 1.2
_LUMINANCE = np.array([0.2627, 0.6780, 0.0593])
_Colours = npt.NDArray[np.float64]


def standard_colours(frame: Any) -> Image.Image:
    """Return a decoded frame in 8 bits of red, green and blue of BT.709.

    PQ counts up to 1,000 nits, to which most of it is graded; what is brighter is white, whatever
    the file says of its mastering. Dolby Vision is what its base layer
    is. HD that names no matrix is BT.709.

    Args:
        frame: of PyAV (without types), with the tags of its stream.
    """
    how = importlib.import_module("av.video.reformatter").Interpolation
    # else what has 10 bits is darker by 2 of 255, and the colours of two pixels are one
    exact = how.BILINEAR | how.ACCURATE_RND | how.FULL_CHR_H_INT
    name_matrix(frame)
    image: Image.Image = frame.to_image(interpolation=exact)
    transfer, primaries = int(frame.color_trc), int(frame.color_primaries)
    if transfer == _PQ:
        return image.filter(_table("pq", _BT2020))
    if transfer == _HLG:
        return image.filter(_table("hlg", _BT2020))
    if primaries in (_BT2020, _DISPLAY_P3):
        return image.filter(_table("standard", primaries))
    return image


@lru_cache(maxsize=4)
def _table(kind: Literal["pq", "hlg", "standard"], primaries: int) -> ImageFilter.Color3DLUT:
    """Return what standard colours those of a grid are; of the grid, red changes fastest."""
    steps = np.linspace(0.0, 1.0, _GRID)
    blue, green, red = np.meshgrid(steps, steps, steps, indexing="ij")
    grid = np.stack([red, green, blue], axis=-1).reshape(_GRID * _GRID, _GRID, 3)
    if kind == "standard":
        found = _graded(grid, _STANDARD, primaries, "relative_colorimetric")
    else:
        signal = hlg_signal(pq_nits(grid)) if kind == "pq" else grid
        found = _graded(signal, _HLG, primaries, "perceptual")
    return ImageFilter.Color3DLUT(_GRID, found.reshape(-1).tolist())


def pq_nits(signal: _Colours) -> _Colours:
    """Return the light that PQ asks of a display, in nits (BT.2100, table 4)."""
    power = signal ** (32.0 / 2523.0)
    ratio = np.maximum(power - 107.0 / 128.0, 0.0) / (2413.0 / 128.0 - 2392.0 / 128.0 * power)
    return 10_000.0 * ratio ** (8192.0 / 1305.0)


def hlg_signal(nits: _Colours) -> _Colours:
    """Return the HLG that a display of 1,000 nits shows so (BT.2100, table 5); more is cut off.

    Args:
        nits: red, green and blue of BT.2020, [..., 3].
    """
    shown = np.minimum(nits / _PEAK_NITS, 1.0)
    luminance = np.maximum(shown @ _LUMINANCE, 1e-9)[..., None]
    scene = shown * luminance ** ((1.0 - _HLG_GAMMA) / _HLG_GAMMA)
    bright = 0.17883277 * np.log(np.maximum(12.0 * scene - 0.28466892, 1e-9)) + 0.55991073
    return np.minimum(np.where(scene <= 1.0 / 12.0, np.sqrt(3.0 * scene), bright), 1.0)


def _graded(signal: _Colours, transfer: int, primaries: int, intent: str) -> _Colours:
    """Return the BT.709 of colours [H, W, 3] in [0, 1], as FFmpeg's filter ``scale`` maps them."""
    av: Any = importlib.import_module("av")
    stored = (signal * 65535.0).round().astype(np.uint16)
    frame = av.VideoFrame.from_ndarray(stored, format="rgb48le")
    frame.color_trc, frame.color_primaries = transfer, primaries
    frame.colorspace, frame.color_range = 0, 2  # neither a matrix nor headroom
    graph = av.filter.Graph()
    size = {"width": frame.width, "height": frame.height, "format": frame.format}
    first = graph.add_buffer(time_base=Fraction(1, 1), **size)
    mapped = graph.add("scale", f"out_transfer=bt709:out_primaries=bt709:intent={intent}")
    stays = graph.add("format", "rgb48le")
    graph.link_nodes(first, mapped, stays, graph.add("buffersink")).configure()
    graph.push(frame)
    return graph.pull().to_ndarray().astype(np.float64) / 65535.0
