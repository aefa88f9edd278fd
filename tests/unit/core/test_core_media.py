"""What messages and rows say of pictures and videos."""

from pathlib import Path

import pytest

from cosmos_core.images import MediaError
from cosmos_core.media import media_beside, text_of, with_media
from cosmos_core.videos import VideoSampling, video_reference


@pytest.fixture
def folder(tmp_path) -> Path:
    return tmp_path


def user(*parts: object) -> dict[str, object]:
    return {"role": "user", "content": list(parts)}


MARK = {"type": "image"}
WORDS = {"type": "text", "text": "Which colour?"}


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image", "image": "a.png"},
        {"type": "image", "path": "a.png"},
        {"type": "image", "url": "a.png", "text": None},  # a column of a table
        {"type": "image_url", "image_url": {"url": "a.png"}},
        {"image": "a.png"},
    ],
)
def test_a_part_names_its_picture_in_any_of_the_usual_ways(folder, part):
    messages, images = with_media([user(part, WORDS)], folder=folder)
    assert messages == (user(MARK, WORDS),)
    assert images == (str(folder / "a.png"),)


def test_a_row_without_pictures_stays_as_it_is(folder):
    rows = [{"role": "system", "content": "Be brief."}, {"role": "assistant", "content": None}]
    assert with_media(rows, folder=folder) == (tuple(rows), ())


def test_the_pictures_of_a_row_fill_the_marks_in_order(folder):
    named = {"type": "image", "image": "b c.png"}
    messages, images = with_media(
        [user(MARK, named, WORDS), user(MARK)], ["a.png", "c.png"], folder=folder
    )
    assert [Path(image).name for image in images] == ["a.png", "b c.png", "c.png"]
    assert messages == (user(MARK, MARK, WORDS), user(MARK))


def test_pictures_that_no_mark_asks_for_stand_before_what_the_user_says(folder):
    rows = [{"role": "system", "content": [MARK]}, {"role": "user", "content": "Which colour?"}]
    messages, images = with_media(rows, ["s.png", "a.png", "b.png"], folder=folder)
    assert [Path(image).name for image in images] == ["s.png", "a.png", "b.png"]
    assert messages[1]["content"] == [MARK, MARK, WORDS]
    later = [*rows, user({"type": "image", "image": "last.png"})]
    _, images = with_media(later, ["s.png", "a.png"], folder=folder)
    assert [Path(image).name for image in images] == ["s.png", "a.png", "last.png"]


CLIP = {"type": "video"}


@pytest.mark.parametrize(
    "part",
    [
        {"type": "video", "video": "a.mp4"},
        {"type": "video", "path": "a.mp4"},
        {"type": "video", "url": "file:///a.mp4", "video": None},
        {"type": "video_url", "video_url": {"url": "a.mp4"}},
        {"video": "a.mp4"},
    ],
)
def test_a_part_names_its_video_in_any_of_the_usual_ways(folder, part):
    messages, (video,) = with_media([user(part, WORDS)], folder=folder)
    assert messages == (user(CLIP, WORDS),)
    base = Path("/") if "url" in part else folder
    assert video == video_reference("a.mp4", base, VideoSampling())


def test_a_video_says_which_of_its_frames_are_shown(folder):
    part = {"type": "video", "video": "a.mp4", "fps": 1, "video_start": 0, "video_end": 2.5}
    _, (video,) = with_media([user(part)], folder=folder, sampling=VideoSampling(max_frames=8))
    assert video == f'video:{{"end":2.5,"fps":1.0,"max_frames":8,"path":"{folder}/a.mp4"}}'
    frames = {"type": "video", "video": ["1.png", "2.png"], "sample_fps": 4, "fps": 1}
    _, (video,) = with_media([user(frames)], folder=folder)
    assert video == f'video:{{"fps":4.0,"frames":["{folder}/1.png","{folder}/2.png"]}}'


def test_pictures_and_videos_of_a_row_fill_their_marks(folder):
    said, found = with_media(
        [user(CLIP, MARK, WORDS)],
        ["a.png", "b.png"],
        ["a.mp4", {"video": "b.mp4", "fps": 1.0}, {"bytes": b"abc", "path": None}],
        folder=folder,
    )
    assert said == (user(MARK, CLIP, CLIP, CLIP, MARK, WORDS),)
    assert found[0] == str(folder / "b.png")
    assert found[1] == video_reference("b.mp4", folder, VideoSampling(fps=1.0))
    assert found[2] == video_reference(b"abc", folder, VideoSampling())
    assert found[3:] == (
        video_reference("a.mp4", folder, VideoSampling()),
        str(folder / "a.png"),
    )


def test_references_are_sources_too(folder):
    sampling = VideoSampling(fps=5.0)
    said, found = with_media([user(CLIP, WORDS)], [], ["a.mp4"], folder=folder, sampling=sampling)
    assert with_media(said, [], found, folder=folder / "elsewhere") == (said, found)


def test_the_text_of_parts_is_theirs_joined():
    assert text_of("Hello") == "Hello"
    assert text_of([MARK, WORDS, {"type": "text", "text": " Quick!"}]) == "Which colour? Quick!"
    assert text_of(None) == ""


@pytest.mark.parametrize(
    ("row", "images", "videos"),
    [
        ({}, [], []),
        ({"images": ["a", "b"], "image": None, "videos": []}, ["a", "b"], []),
        ({"images": "a", "video": {"path": "b", "fps": 2}}, ["a"], [{"path": "b", "fps": 2}]),
        ({"image": ["a", "b"], "videos": "c"}, ["a", "b"], ["c"]),
        ({"image": b"a", "video": ["a", "b"]}, [b"a"], [["a", "b"]]),  # frames of one
    ],
)
def test_a_row_names_one_or_several(row, images, videos):
    assert media_beside(row, "images") == images
    assert media_beside(row, "videos") == videos


def test_a_row_says_what_it_shows_in_one_place():
    with pytest.raises(MediaError, match="both 'videos' and 'video'; one list says them in order"):
        media_beside({"videos": ["a.mp4"], "video": "b.mp4"}, "videos")
    assert media_beside({"pictures": ["a"], "picture": "b"}, "pictures") == ["a"]


@pytest.mark.parametrize(
    ("messages", "images", "words"),
    [
        ([user(MARK)], [], "message 0: has a picture without a source"),
        ([user({"type": "sound", "sound": "a.mp3"})], [], "part 0: type 'sound' is not known"),
        ([user({"type": "video"})], [], "message 0: has a video without a source"),
        ([user({"type": "video", "video": "a.mp4", "fps": 0})], [], "fps > 0"),
        ([user({"type": "video", "video": "a.mp4", "fps": "2"})], [], "fps is a number"),
        ([user({"type": "video", "video": []})], [], "a video without a source"),
        (["a.png"], [], "message 0 is str"),
        ([user("a.png")], [], "part 0: is str, not a dictionary"),
        ([user({"type": "text", "text": 7})], [], "its text is int"),
        ([{"role": "assistant", "content": "Hi"}], ["a.png"], "no message of the user"),
        ([user(MARK)], [7], "a path, a URL or bytes, found int"),
        ([user(MARK)], [{"name": "a"}], "neither bytes nor path"),
        ([user(MARK)], ["https://example.org/a.png"], "download it"),
    ],
)
def test_messages_that_name_pictures_wrongly_are_refused(folder, messages, images, words):
    with pytest.raises(MediaError, match=words):
        with_media(messages, images, folder=folder)
