"""Shapes that were drawn are found again, and rewards say what of a prompt is there."""

import pytest
import torch
from PIL import Image, ImageDraw

from cosmos_wfm import COLOURS, REWARDS, WfmConfigError, read_scene

GREY = (128, 128, 128)


def picture(*drawn, size=64, factor=4):
    """Draw (shape, colour, x, y, radius) with blurred edges; return pixels [3, 1, H, W]."""
    canvas = Image.new("RGB", (size * factor, size * factor), GREY)
    pen = ImageDraw.Draw(canvas)
    for shape, colour, x, y, radius in drawn:
        fill = tuple(round(255 * value) for value in COLOURS[colour])
        x, y, r = x * factor, y * factor, radius * factor
        match shape:
            case "square":
                pen.rectangle((x - r, y - r, x + r, y + r), fill)
            case "disc":
                pen.ellipse((x - r, y - r, x + r, y + r), fill)
            case "diamond":
                pen.polygon([(x - r, y), (x, y - r), (x + r, y), (x, y + r)], fill)
            case "triangle":
                pen.polygon([(x - r, y + r), (x, y - r), (x + r, y + r)], fill)
    small = canvas.resize((size, size), Image.Resampling.BOX)
    data = torch.frombuffer(bytearray(small.tobytes()), dtype=torch.uint8)
    return (data.view(size, size, 3).permute(2, 0, 1).float() / 255.0).unsqueeze(1)


@pytest.mark.parametrize("colour", list(COLOURS))
@pytest.mark.parametrize("shape", ["square", "disc", "diamond", "triangle"])
def test_every_shape_is_found_in_every_colour(shape, colour):
    pixels = picture((shape, colour, 30, 34, 12))
    other = "disc" if shape != "disc" else "square"
    away = "red" if colour != "red" else "blue"

    assert REWARDS["shapes_strict"](pixels, f"a {colour} {shape}") == 1.0
    assert REWARDS["shape"](pixels, f"a {other}") == 0.0
    # Of shape, colour, count and place the first and the last are right.
    assert REWARDS["shapes"](pixels, f"a {away} {shape}") == 0.5


@pytest.mark.parametrize(
    ("prompt", "count"),
    [
        ("three red discs", 1.0),
        ("two red discs", 1 - 1 / 3),
        ("six red circles", 0.5),
        ("a blue disc", 0.0),
        ("four discs", 1.0),  # whatever their colour
        ("three red discs and two green discs", (1 + 0.5) / 2),
    ],
)
def test_shapes_are_counted(prompt, count):
    discs = [("disc", "red", x, 16, 7) for x in (12, 32, 52)]
    pixels = picture(*discs, ("disc", "green", 32, 48, 7))

    assert REWARDS["shape_count"](pixels, prompt) == pytest.approx(count)


@pytest.mark.parametrize(
    ("prompt", "position"),
    [
        ("a red square left of a blue disc", 1.0),
        ("a red square to the right of a blue disc", 0.0),
        ("a blue disc right of a red square", 1.0),
        ("a red square above a blue disc", 1.0),
        ("a square below a disc", 0.0),
        ("a red square and a blue disc", 1.0),  # no place is asked for
        ("a green square left of a blue disc", 0.0),  # there is none
    ],
)
def test_places_are_compared(prompt, position):
    pixels = picture(("square", "red", 16, 20, 9), ("disc", "blue", 46, 44, 9))

    assert REWARDS["shape_position"](pixels, prompt) == position


def test_two_objects_have_their_own_colours():
    pixels = picture(("square", "red", 16, 20, 9), ("disc", "blue", 46, 44, 9))

    assert REWARDS["shape_colour"](pixels, "a red square and a blue disc") == 1.0
    assert REWARDS["shape_colour"](pixels, "a red square and a red disc") == 0.5
    assert REWARDS["shape_colour"](pixels, "a blue square and a red disc") == 0.0
    assert REWARDS["shape"](pixels, "a square and a triangle") == 0.5


def test_a_video_is_the_mean_of_its_frames_and_an_empty_picture_has_nothing():
    video = torch.cat([picture(("disc", "red", 32, 32, 12)), picture()], dim=1)

    assert REWARDS["shape"](video, "a disc") == 0.5
    assert REWARDS["shape_count"](picture(), "a disc") == 0.0


def test_shapes_that_touch_in_two_colours_are_two():
    pixels = picture(("square", "red", 22, 32, 10), ("square", "blue", 42, 32, 10))

    assert REWARDS["shapes_strict"](pixels, "a red square left of a blue square") == 1.0


def test_a_prompt_without_shapes_is_refused():
    with pytest.raises(WfmConfigError, match="does not name a shape: diamond, disc"):
        REWARDS["shape"](picture(), "a red dog")
    with pytest.raises(WfmConfigError, match="two shapes to be left of"):
        REWARDS["shape"](picture(), "a disc left of a dog")


@pytest.mark.parametrize(
    ("prompt", "found"),
    [
        ("3 red discs", [("disc", "red", 3)]),
        ("seven blue squares above 12 black disks", [("square", "blue", 7), ("disc", "black", 12)]),
        ("a 4k picture of a red square", [("square", "red", 1)]),
    ],
)
def test_numbers_in_digits_and_beyond_six_count(prompt, found):
    assert [(each.shape, each.colour, each.num) for each in read_scene(prompt).objects] == found
