"""Colours of HDR and wide-gamut videos as they are trained on."""

import av
import numpy as np
import pytest
import torch

from cosmos_wfm.video_colours import hlg_signal, pq_nits
from cosmos_wfm.videos import read_frames, write_video

SDR, BT2020_SDR, PQ, HLG = 1, 14, 16, 18  # of ITU-T H.273
BT709, BT2020 = 1, 9


def write_patches(path, colours, *, transfer, primaries, matrix):
    """Write patches of 16x16 of R'G'B' in [0, 1] side by side, in 10 bits without loss."""
    red, green, blue = np.asarray(colours, np.float64).repeat(16, 0).T
    kr, kb = (0.2126, 0.0722) if matrix == BT709 else (0.2627, 0.0593)
    luma = kr * red + (1 - kr - kb) * green + kb * blue
    planes = (
        64 + 876 * luma,
        512 + 896 * (blue - luma) / (2 * (1 - kb)),
        512 + 896 * (red - luma) / (2 * (1 - kr)),
    )
    frame = av.VideoFrame(len(red), 16, "yuv444p10le")
    with av.open(str(path), "w") as container:
        stream = container.add_stream("ffv1", rate=16)
        stream.width, stream.height, stream.pix_fmt = len(red), 16, "yuv444p10le"
        for tagged in (frame, stream.codec_context):
            tagged.color_trc, tagged.color_primaries = transfer, primaries
            tagged.colorspace, tagged.color_range = matrix, 1
        for plane, line in zip(frame.planes, planes, strict=True):
            stored = np.zeros((16, plane.line_size // 2), np.uint16)
            stored[:, : len(line)] = line.round()
            plane.update(stored.tobytes())
        container.mux([*stream.encode(frame), *stream.encode()])


def shown(path):
    """Return the colour in the middle of each patch, as numbers from 0 to 255."""
    [image] = read_frames(path, 1, name="x")
    return np.asarray(image, np.int64)[8, 8::16]


def test_standard_colours_of_ten_bits_stay_as_they_are(tmp_path):
    colours = np.array([[0, 0, 0], [0.5, 0.5, 0.5], [1, 1, 1], [0.8, 0.1, 0.3]])
    tags = {"transfer": SDR, "primaries": BT709, "matrix": BT709}
    write_patches(tmp_path / "a.mkv", colours, **tags)

    # rounded anyhow, white is 253
    np.testing.assert_allclose(shown(tmp_path / "a.mkv"), 255 * colours, atol=1)


def test_signals_of_pq_and_hlg_are_those_of_the_standard():
    # BT.2408, tables 1 and 2: of a card of 18 % grey and of the white of graphics
    np.testing.assert_allclose(pq_nits(np.array([0.38, 0.58, 1.0])), [26, 203, 10_000], rtol=0.02)
    greys = np.array([0.0, 26.0, 203.0, 1000.0, 4000.0])[:, None].repeat(3, 1)
    np.testing.assert_allclose(
        hlg_signal(greys), np.array([0, 0.38, 0.75, 1, 1])[:, None].repeat(3, 1), atol=0.005
    )


def test_a_video_of_hlg_is_tone_mapped(tmp_path):
    colours = [[0, 0, 0], [0.38, 0.38, 0.38], [0.75, 0.75, 0.75], [1, 1, 1], [0.6, 0.5, 0.4]]
    write_patches(tmp_path / "a.mkv", colours, transfer=HLG, primaries=BT2020, matrix=BT2020)

    black, grey, white, peak, skin = shown(tmp_path / "a.mkv")

    assert black.max() <= 1
    assert peak.min() >= 254
    # taken as stored, 97 and 191
    np.testing.assert_allclose(grey, 90, atol=4)
    np.testing.assert_allclose(white, 173, atol=4)
    assert skin[0] - skin[2] > 255 * (0.6 - 0.4)  # more colourful than as stored


@pytest.mark.slow
def test_pq_shows_what_hlg_shows_of_the_same_light(tmp_path):
    signal = np.array([[0.2, 0.2, 0.2], [0.58, 0.58, 0.58], [0.5, 0.4, 0.3], [0.2, 0.45, 0.4]])
    tags = {"primaries": BT2020, "matrix": BT2020}
    write_patches(tmp_path / "pq.mkv", signal, transfer=PQ, **tags)
    write_patches(tmp_path / "hlg.mkv", hlg_signal(pq_nits(signal)), transfer=HLG, **tags)

    np.testing.assert_allclose(shown(tmp_path / "pq.mkv"), shown(tmp_path / "hlg.mkv"), atol=5)


def test_the_wide_gamut_of_a_standard_video_is_converted(tmp_path):
    # linear BT.709 of (0.2, 0.5, 0.3), by the matrix of BT.2087
    wanted = np.array([0.2, 0.5, 0.3])
    to_wide = [[0.6274, 0.3293, 0.0433], [0.0691, 0.9195, 0.0114], [0.0164, 0.0880, 0.8956]]
    wide = (np.array(to_wide) @ wanted) ** (1 / 2.4)
    tags = {"transfer": BT2020_SDR, "primaries": BT2020, "matrix": BT2020}
    write_patches(tmp_path / "a.mkv", [wide, np.ones(3)], **tags)

    found, white = shown(tmp_path / "a.mkv")

    np.testing.assert_allclose(found, 255 * wanted ** (1 / 2.4), atol=4)
    assert white.min() >= 254


@pytest.mark.parametrize("lines", [64, 720])
def test_a_video_that_was_written_says_that_it_is_bt709(tmp_path, lines):
    colour = torch.tensor([200.0, 40.0, 30.0])
    write_video(tmp_path / "a.mp4", (colour / 127.5 - 1).view(3, 1, 1, 1).expand(3, 2, lines, 64))

    with av.open(str(tmp_path / "a.mp4")) as container:
        frame = next(container.decode(video=0))

    assert (frame.colorspace, frame.color_primaries, frame.color_trc, frame.color_range) == (1,) * 4
    [image] = read_frames(tmp_path / "a.mp4", 1, name="x")
    np.testing.assert_allclose(np.asarray(image)[8, 8], colour, atol=3)


@pytest.mark.parametrize(("lines", "matrix"), [(720, 1), (480, 5)])
def test_a_video_that_names_no_matrix_is_read_as_players_guess_it(tmp_path, lines, matrix):
    pixels = np.full((lines, 64, 3), (200, 40, 30), np.uint8)
    with av.open(str(tmp_path / "a.mp4"), "w") as container:
        stream = container.add_stream("libx264", rate=16)
        stream.height, stream.width, stream.pix_fmt = lines, 64, "yuv420p"
        frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
        stored = frame.reformat(format="yuv420p", dst_colorspace=matrix)
        container.mux([*stream.encode(stored), *stream.encode()])

    [image] = read_frames(tmp_path / "a.mp4", 1, name="x")

    np.testing.assert_allclose(np.asarray(image)[8, 8], (200, 40, 30), atol=3)
