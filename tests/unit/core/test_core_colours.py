"""Colours of pictures and videos as viewers show them."""

from pathlib import Path

import numpy as np
import pytest

from cosmos_core.images import read_image
from cosmos_core.videos import VideoSampling, read_video, video_reference

av = pytest.importorskip("av")
Image = pytest.importorskip("PIL.Image")
ImageCms = pytest.importorskip("PIL.ImageCms")
RED, BLUE = (200, 40, 30), (30, 40, 200)
UNNAMED, BT709, BT601 = 2, 1, 5  # of ITU-T H.273, and FFmpeg's for SMPTE 170M


def srgb() -> bytes:
    return ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()


def swapped() -> bytes:
    """Return a profile for which red is what sRGB calls blue, and blue what it calls red."""
    return srgb().replace(b"rXYZ", b"----").replace(b"bXYZ", b"rXYZ").replace(b"----", b"bXYZ")


def first_pixel(path: Path, picture, profile: bytes) -> tuple[int, ...]:
    picture.save(path, icc_profile=profile)
    return read_image(str(path)).getpixel((0, 0))


@pytest.mark.parametrize("mode", ["RGB", "P", "RGBA"])
def test_pictures_are_shown_as_their_profiles_say(tmp_path, mode):
    plain = Image.new("RGB", (4, 4), RED)
    picture = plain.quantize(2) if mode == "P" else plain.convert(mode)

    found = first_pixel(tmp_path / "a.png", picture, swapped())

    np.testing.assert_allclose(found, BLUE, atol=1)


def test_what_is_transparent_stays_so_under_a_profile(tmp_path):
    clear = Image.new("RGBA", (4, 4), (*RED, 0))

    assert first_pixel(tmp_path / "a.png", clear, swapped()) == (255, 255, 255)


@pytest.mark.parametrize("profile", [srgb(), b"no profile", swapped()[:300]])
def test_a_profile_of_srgb_or_a_damaged_one_changes_nothing(tmp_path, profile):
    assert first_pixel(tmp_path / "a.png", Image.new("RGB", (4, 4), RED), profile) == RED


def test_a_profile_of_other_colours_than_the_picture_has_is_passed_over(tmp_path):
    grey = Image.new("L", (4, 4), 90)

    assert first_pixel(tmp_path / "a.png", grey, swapped()) == (90, 90, 90)


def write_colour(path: Path, size: tuple[int, int], stored_as: int, said: int) -> str:
    """Write a video of red, and return a reference of it.

    Args:
        path: of the file.
        size: height and width.
        stored_as: number of the matrix it is converted with.
        said: number of the matrix that the file names.
    """
    height, width = size
    pixels = np.empty((height, width, 3), np.uint8)
    pixels[:] = RED
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=16)
        stream.height, stream.width, stream.pix_fmt = height, width, "yuv420p"
        stream.codec_context.colorspace = said
        rgb = av.VideoFrame.from_ndarray(pixels, format="rgb24")
        stored = rgb.reformat(format="yuv420p", dst_colorspace=stored_as)
        container.mux([*stream.encode(stored), *stream.encode()])
    return video_reference(str(path), path.parent, VideoSampling())


@pytest.mark.parametrize(
    ("size", "stored_as", "said"),
    [
        ((720, 640), BT709, UNNAMED),
        ((536, 1280), BT709, UNNAMED),  # HD, cut to the shape of a film
        ((576, 720), BT601, UNNAMED),
        ((720, 640), BT601, BT601),
        ((64, 64), BT709, BT709),
    ],
)
def test_the_matrix_of_a_video_is_the_one_it_names_or_players_guess(
    tmp_path, size, stored_as, said
):
    frames = read_video(write_colour(tmp_path / "a.mp4", size, stored_as, said))

    np.testing.assert_allclose(frames[0, 8, 8], RED, atol=3)
