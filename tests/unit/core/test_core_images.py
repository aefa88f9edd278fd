"""Pictures by reference: what names them, and what is read of them."""

import base64
import io
import zlib
from pathlib import Path

import pytest

from cosmos_core.images import (
    ImageError,
    image_bytes,
    image_size,
    read_image,
    reference_of,
)

Image = pytest.importorskip("PIL.Image")


def png(colour: str = "red", size: tuple[int, int] = (3, 2), mode: str = "RGB") -> bytes:
    buffer = io.BytesIO()
    Image.new(mode, size, colour).save(buffer, format="PNG")
    return buffer.getvalue()


@pytest.fixture
def folder(tmp_path) -> Path:
    (tmp_path / "a.png").write_bytes(png())
    (tmp_path / "b c.png").write_bytes(png("blue"))
    return tmp_path


@pytest.mark.parametrize(
    ("source", "name"),
    [("a.png", "a.png"), ("file:///somewhere/b%20c.png", "b c.png"), ({"path": "a.png"}, "a.png")],
)
def test_files_are_named_by_their_absolute_paths(folder, source, name):
    reference = reference_of(source, folder)
    assert Path(reference).is_absolute()
    assert Path(reference).name == name


@pytest.mark.parametrize(
    "make",
    [
        lambda data: data,
        lambda data: {"bytes": data, "path": "gone.png"},
        lambda data: f"data:image/png;base64,{base64.b64encode(data).decode()}",
        lambda data: Image.open(io.BytesIO(data)),
    ],
)
def test_a_picture_that_is_no_file_travels_in_its_reference(folder, make):
    reference = reference_of(make(png("lime")), folder)
    assert read_image(reference).getpixel((0, 0)) == (0, 255, 0)
    assert image_size(reference) == (2, 3)
    Image.open(io.BytesIO(image_bytes(reference))).verify()


def test_pictures_are_upright_and_transparency_is_white(folder):
    exif = Image.Exif()
    exif[0x0112] = 6  # lies on its right side
    Image.new("RGB", (3, 2), "red").save(folder / "lying.jpg", exif=exif)
    assert read_image(str(folder / "lying.jpg")).size == (2, 3)
    assert image_size(str(folder / "lying.jpg")) == (3, 2)
    (folder / "glass.png").write_bytes(png((255, 0, 0, 0), mode="RGBA"))
    assert read_image(str(folder / "glass.png")).getpixel((0, 0)) == (255, 255, 255)
    Image.new("L", (3, 2), 7).save(folder / "grey.png")
    assert read_image(str(folder / "grey.png")).getpixel((0, 0)) == (7, 7, 7)


def test_what_is_no_picture_is_refused_by_name(folder):
    (folder / "text.png").write_text("not a picture")
    (folder / "cut.png").write_bytes(png(size=(64, 64))[:90])
    for name, words in (
        ("gone.png", "cannot read the picture .*gone.png: No such file"),
        ("text.png", "text.png is no picture"),
        ("cut.png", "cut.png is no picture"),
    ):
        with pytest.raises(ImageError, match=words):
            read_image(str(folder / name))
    with pytest.raises(ImageError, match="No such file"):
        image_size(str(folder / "gone.png"))
    with pytest.raises(ImageError, match="not base64"):
        read_image("data:image/png;base64,%%%")
    with pytest.raises(ImageError, match="a data URL of a picture is base64"):
        read_image("data:image/png,abc")


def test_no_program_is_run_to_draw_a_picture(tmp_path):
    Image.new("RGB", (8, 8)).save(tmp_path / "drawn.eps")  # PIL has Ghostscript draw it
    (tmp_path / "drawn.eps").rename(tmp_path / "drawn.png")
    for read in (image_size, read_image):
        with pytest.raises(ImageError, match=r"drawn\.png is no picture .* EPS is a program"):
            read(str(tmp_path / "drawn.png"))


def chunk(kind: bytes, data: bytes) -> bytes:
    return len(data).to_bytes(4, "big") + kind + data + zlib.crc32(kind + data).to_bytes(4, "big")


def test_the_size_of_a_png_is_read_without_its_pixels(tmp_path):
    whole, end = png(size=(300, 200)), chunk(b"IEND", b"")
    assert whole.endswith(end)
    begin = whole.index(b"IDAT")
    (tmp_path / "broken.png").write_bytes(whole[:begin] + b"IDAT" + bytes(len(whole) - begin - 4))
    assert image_size(str(tmp_path / "broken.png")) == (200, 300)
    with pytest.raises(ImageError, match=r"broken\.png is no picture that can be read"):
        read_image(str(tmp_path / "broken.png"))
    # a quarter turn, said after the pixels
    exif = Image.Exif()
    exif[0x0112] = 6
    words = chunk(b"eXIf", exif.tobytes().removeprefix(b"Exif\0\0"))
    turned = reference_of(whole.removesuffix(end) + words + end, tmp_path)
    assert image_size(turned) == (300, 200)
    assert read_image(turned).size == (200, 300)
