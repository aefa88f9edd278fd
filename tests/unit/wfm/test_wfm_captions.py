"""Directories of captioned images."""

import json
import struct
from dataclasses import replace
from zlib import crc32

import numpy as np
import pytest
import torch
from PIL import Image, ImageCms

from cosmos_wfm import CaptionDataError, ImageCaptionsConfig
from cosmos_wfm.captions import read_image


def write_pair(directory, name, pixels, prompt="p", suffix=".png"):
    Image.fromarray(np.asarray(pixels, np.uint8)).save(directory / f"{name}{suffix}")
    (directory / f"{name}.json").write_text(json.dumps({"prompt": prompt}))


def opened(directory, height=2, width=2):
    return ImageCaptionsConfig(path=str(directory), height=height, width=width).build()


def test_pairs_come_in_order_of_their_names_with_pixels_from_minus_one_to_one(tmp_path):
    white, black = np.full((2, 2, 3), 255), np.zeros((2, 2, 3))
    write_pair(tmp_path, "0002", white, "white", suffix=".webp")
    write_pair(tmp_path, "0001", black, "black")

    data = opened(tmp_path)

    assert [sample.prompt for sample in data] == ["black", "white"]
    assert torch.equal(data[0].pixels, -torch.ones(3, 2, 2))
    assert data[1].pixels.min() > 0.9


def test_an_image_is_scaled_to_cover_and_cropped_to_its_centre(tmp_path):
    # 8 wide, 4 high, the outer columns black: halved and cropped to 2x2, only the centre is left.
    pixels = np.zeros((4, 8, 3))
    pixels[:, 2:6] = 255
    write_pair(tmp_path, "a", pixels)

    data = opened(tmp_path)

    assert data[0].pixels.shape == (3, 2, 2)
    assert data[0].pixels.min() > 0.7


def test_a_grey_picture_of_16_bits_keeps_its_shades(tmp_path):
    shades = np.array([[0, 257], [128 * 257, 65535]], np.uint16)
    Image.fromarray(shades).save(tmp_path / "a.png")
    (tmp_path / "a.json").write_text('{"prompt": "p"}')

    pixels = opened(tmp_path)[0].pixels

    assert ((pixels + 1) * 127.5).round().tolist() == [[[0, 1], [128, 255]]] * 3


def png_of_size(width, height):
    """Return a PNG that says it is so large, and has nothing in it."""
    header = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + header + crc32(header).to_bytes(4, "big")


@pytest.mark.parametrize(
    "data",
    [
        b"no picture",
        png_of_size(1 << 16, 1 << 16),  # PIL: a bomb
        png_of_size(2, 2) + b"\0\0\0\1\xff\xff\xff\xff",  # PIL: a SyntaxError
        b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 4) + b"IHDR" + bytes(8),  # PIL: a ValueError
    ],
)
def test_whatever_is_wrong_with_a_file_it_is_skipped(tmp_path, data):
    write_pair(tmp_path, "good", np.zeros((2, 2, 3)), "good")
    write_pair(tmp_path, "bad", np.zeros((2, 2, 3)), "bad")
    (tmp_path / "bad.png").write_bytes(data)
    config = ImageCaptionsConfig(path=str(tmp_path), height=2, width=2)

    found = replace(config, broken="skip").build()

    assert [sample.prompt for sample in found] == ["good", "good"]
    assert len(found.problems) == 1
    assert "bad.png cannot be read as an image" in found.problems[0]
    with pytest.raises(CaptionDataError, match=r"bad\.png cannot be read as an image"):
        config.build()[0]


def test_a_picture_that_was_taken_upright_is_shown_upright(tmp_path):
    stored = Image.new("RGB", (4, 2), "white")
    stored.paste("black", (0, 0, 2, 2))  # the left half, which is the top of what was seen
    exif = Image.Exif()
    exif[0x0112] = 6  # turn it by a quarter, clockwise
    stored.save(tmp_path / "a.png", exif=exif)
    (tmp_path / "a.json").write_text('{"prompt": "p"}')

    pixels = opened(tmp_path, height=4, width=2)[0].pixels

    assert torch.equal(pixels[:, :2], -torch.ones(3, 2, 2))
    assert torch.equal(pixels[:, 2:], torch.ones(3, 2, 2))


def test_a_picture_whose_other_exif_is_damaged_is_still_shown_upright(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 3  # upside down
    exif[0x011A] = 72.0
    stored = Image.new("RGB", (2, 4), "white")
    stored.paste("black", (0, 0, 2, 2))
    stored.save(tmp_path / "a.webp", exif=exif, lossless=True)
    data = (tmp_path / "a.webp").read_bytes()
    assert b"\x01\x1a\0\5" in data  # the resolution, which is a ratio: now it is said to be text
    (tmp_path / "a.webp").write_bytes(data.replace(b"\x01\x1a\0\5", b"\x01\x1a\0\2"))
    (tmp_path / "a.json").write_text('{"prompt": "p"}')

    pixels = opened(tmp_path, height=4, width=2)[0].pixels

    assert pixels[0, :, 0].tolist() == [1.0, 1.0, -1.0, -1.0]


@pytest.mark.parametrize("palette", [False, True])
def test_what_is_transparent_is_white(tmp_path, palette):
    levels = np.zeros((2, 2, 4), np.uint8)
    levels[..., 0], levels[..., 3] = 100, [[0, 255], [255, 0]]  # a dark red, shown or not
    picture = Image.fromarray(levels)
    if palette:
        picture = picture.convert("RGB").quantize(1)
        picture.putdata([0, 1, 1, 0])
        picture.putpalette([100, 0, 0, 100, 0, 0])
        picture.info["transparency"] = bytes([0, 255])
    picture.save(tmp_path / "a.png")
    (tmp_path / "a.json").write_text('{"prompt": "p"}')

    pixels = ((opened(tmp_path)[0].pixels + 1) * 127.5).round()

    assert pixels.permute(1, 2, 0).tolist() == [
        [[255, 255, 255], [100, 0, 0]],
        [[100, 0, 0], [255, 255, 255]],
    ]


def test_a_line_of_pixels_takes_no_more_memory_than_it_is_made_large(tmp_path):
    line = np.zeros((1, 60_000, 3))
    line[:, 30_000:] = 255
    write_pair(tmp_path, "a", line)  # enlarged whole, 60 GiB

    pixels = opened(tmp_path, height=600, width=600)[0].pixels

    assert pixels.shape == (3, 600, 600)
    assert pixels[:, :, 0].max() < -0.9
    assert pixels[:, :, -1].min() > 0.9


def test_names_in_capitals_are_taken_and_hidden_files_left_alone(tmp_path):
    write_pair(tmp_path, "a", np.zeros((2, 2, 3)))
    (tmp_path / "a.png").rename(tmp_path / "a.PNG")
    for name in ("._a.json", "._a.PNG", "._b.png", ".DS_Store"):  # as systems leave them
        (tmp_path / name).write_bytes(b"\0\5\x16\7\0\2\xff")

    data = opened(tmp_path)

    assert (len(data), len(data.problems)) == (1, 0)
    assert torch.equal(data[0].pixels, -torch.ones(3, 2, 2))
    Image.new("RGB", (2, 2)).save(tmp_path / "B.JPG")
    with pytest.raises(CaptionDataError, match=r"B\.JPG: there is no B\.json"):
        opened(tmp_path)


def test_folders_are_descended_into_in_a_stable_order_hidden_ones_left_alone(tmp_path):
    for place in ("b", "a/x", "a", ".cache", "."):
        (tmp_path / place).mkdir(parents=True, exist_ok=True)
        write_pair(tmp_path / place, "0001", np.zeros((2, 2, 3)), place)

    assert [sample.prompt for sample in opened(tmp_path)] == [".", "a", "a/x", "b"]
    (tmp_path / "a" / "x" / "0001.json").unlink()
    with pytest.raises(CaptionDataError, match=r"a/x/0001\.png: there is no 0001\.json or 0001"):
        opened(tmp_path)


def test_links_are_followed_each_folder_once_round_circles_too(tmp_path):
    outside = tmp_path / "outside"
    (outside / "deep").mkdir(parents=True)
    write_pair(outside / "deep", "0001", np.zeros((2, 2, 3)), "linked")
    root = tmp_path / "data"
    root.mkdir()
    (root / "a").symlink_to(outside)
    (root / "again").symlink_to(outside / "deep")
    (outside / "deep" / "up").symlink_to(root)
    (root / "self.png").symlink_to(root / "self.png")
    (root / "gone.png").symlink_to(root / "nothing.png")

    data = opened(root)

    assert [sample.prompt for sample in data] == ["linked"]
    assert len(data.problems) == 0


def test_a_text_is_a_caption_beside_an_image_and_where_the_json_has_no_prompt(tmp_path):
    for name, about in (("a", None), ("b", {"width": 2}), ("c", {"prompt": "of the json"})):
        Image.new("RGB", (2, 2)).save(tmp_path / f"{name}.png")
        (tmp_path / f"{name}.txt").write_text(f"text {name}\n")
        if about is not None:
            (tmp_path / f"{name}.json").write_text(json.dumps(about))
    (tmp_path / "README.txt").write_text("about this set")

    data = opened(tmp_path)

    assert sorted(sample.prompt for sample in data) == ["of the json", "text a", "text b"]


def test_every_broken_pair_is_named(tmp_path):
    write_pair(tmp_path, "good", np.zeros((2, 2, 3)))
    (tmp_path / "lonely.json").write_text('{"prompt": "p"}')
    (tmp_path / "nothing.json").write_text("{}")
    (tmp_path / "number.json").write_text('{"prompt": 3}')

    with pytest.raises(CaptionDataError) as caught:
        opened(tmp_path)

    message = str(caught.value)
    assert "3 broken pairs" in message
    assert "lonely.json: 0 images of that name" in message
    assert "nothing.json: no prompt" in message
    assert "number.json: prompt is int, not text" in message


def test_an_image_that_is_too_small_is_named_and_fatal_or_skipped(tmp_path):
    write_pair(tmp_path, "a", np.zeros((4, 2, 3)))
    write_pair(tmp_path, "b", np.zeros((4, 4, 3)), prompt="large enough")
    config = ImageCaptionsConfig(path=str(tmp_path), height=6, width=6, max_enlargement=1.5)

    # 2 pixels wide, 6 wanted: 3 times; 4 wanted of it: 1.5 times.
    with pytest.raises(
        CaptionDataError, match=r"a\.png is 4x2 pixels; for 6x6 .* enlarged 3 times"
    ):
        config.build()[0]
    data = replace(config, broken="skip").build()
    assert (data[0].prompt, len(data.problems)) == ("large enough", 1)
    assert "max_enlargement is 1.5" in data.problems[0]
    assert replace(config, max_enlargement=0.0).build()[0].pixels.shape == (3, 6, 6)


def test_a_directory_without_pairs_or_no_directory_is_refused(tmp_path):
    with pytest.raises(CaptionDataError, match=r"has no <name>\.json or \.txt beside"):
        opened(tmp_path)
    with pytest.raises(CaptionDataError, match="is not a directory"):
        opened(tmp_path / "missing")


def test_a_file_that_is_no_image_is_named_on_access(tmp_path):
    (tmp_path / "a.json").write_text('{"prompt": "p"}')
    (tmp_path / "a.png").write_bytes(b"not an image")

    with pytest.raises(CaptionDataError, match=r"a\.png cannot be read as an image"):
        opened(tmp_path)[0]


def test_no_program_is_run_to_draw_an_image(tmp_path):
    Image.new("RGB", (8, 8)).save(tmp_path / "drawn.eps")  # PIL has Ghostscript draw it
    with pytest.raises(CaptionDataError, match=r"0001\.png cannot be .* EPS is a program"):
        read_image(tmp_path / "drawn.eps", name="0001.png")


def test_a_picture_is_trained_on_in_the_colours_of_its_profile(tmp_path):
    srgb = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    swapped = srgb.replace(b"rXYZ", b"----").replace(b"bXYZ", b"rXYZ").replace(b"----", b"bXYZ")
    Image.new("RGB", (4, 4), (200, 40, 30)).save(tmp_path / "a.jpg", icc_profile=swapped)

    found = read_image(tmp_path / "a.jpg", name="a").getpixel((0, 0))

    np.testing.assert_allclose(found, (30, 40, 200), atol=3)
