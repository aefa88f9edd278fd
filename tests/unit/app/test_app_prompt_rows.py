"""Rows of prompts as a run keeps them: texts as they are, pictures and videos as files."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import pytest
from clips import write_clip
from PIL import Image

from cosmos_app.errors import DataError
from cosmos_app.prompt_rows import has_pictures, most_videos, prompt_rows
from cosmos_app.quickstart.arithmetic import write_rows
from cosmos_core.videos import VideoSampling, read_video, video_reference, video_sources

MARK = {"type": "image"}
GREYS = [(8 * number,) * 3 for number in range(8)]
WORDS = {"type": "text", "text": "Which colour?"}
ASKED = [{"role": "user", "content": [MARK, WORDS]}]


@pytest.fixture
def data(tmp_path) -> Path:
    folder = tmp_path / "data"
    (folder / "pictures").mkdir(parents=True)
    Image.new("RGB", (4, 4), "red").save(folder / "pictures" / "red.png")
    return folder


def written(folder: Path, *rows: object) -> Path:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_rows_without_pictures_stay_as_they_are(data):
    rows = [
        {"prompt": "1+2=", "answer": "3", "level": 1},
        {"messages": [{"role": "user", "content": "1+2="}], "answer": "3"},
    ]
    path = written(data, *rows, {"prompt": "0", "images": [], "image": None})
    assert list(prompt_rows(path)) == [*rows, {"prompt": "0"}]
    write_rows(data / "kept.jsonl", prompt_rows(path))
    assert not has_pictures(data / "kept.jsonl")


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "Which colour?", "images": ["pictures/red.png"]},
        {"prompt": "Which colour?", "image": "pictures/red.png"},
        {"messages": [{"role": "user", "content": "Which colour?"}], "image": "pictures/red.png"},
        {"messages": [{"role": "user", "content": [{**MARK, "image": "pictures/red.png"}, WORDS]}]},
    ],
)
def test_a_row_with_pictures_has_messages_with_marks_and_paths(data, row):
    (kept,) = prompt_rows(written(data, {**row, "answer": "red"}))
    assert kept == {
        "messages": ASKED,
        "images": [str(data / "pictures" / "red.png")],
        "answer": "red",
    }
    write_rows(data / "kept.jsonl", [kept])
    assert has_pictures(data / "kept.jsonl")
    assert list(prompt_rows(data / "kept.jsonl")) == [kept]  # once and for all


def test_pictures_in_the_rows_of_a_table_become_files_once(data):
    picture = (data / "pictures" / "red.png").read_bytes()
    rows = [{"prompt": "Which colour?", "images": [{"bytes": picture, "path": None}]}] * 2
    pyarrow.parquet.write_table(pa.Table.from_pylist(rows), data / "rows.parquet")
    kept = list(prompt_rows(data / "rows.parquet", data / "kept"))
    assert len(kept) == 2
    (file,) = (data / "kept").iterdir()
    assert file.read_bytes() == picture
    assert [row["images"] for row in kept] == [[str(file)], [str(file)]]
    (first, _) = prompt_rows(data)  # a directory has its tables in it
    assert first["images"][0].startswith("data:")


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"prompt": "?", "images": ["gone.png"]}, r"rows.jsonl:1: .*gone.png: No such file"),
        ({"prompt": "?", "images": 7}, "rows.jsonl:1: a picture is a path, .* found int"),
        ({"prompt": "?", "images": ["a.png"], "image": "b.png"}, "has both 'images' and 'image'"),
        ({"messages": [{"role": "user", "content": [MARK]}]}, "without a source"),
        ({"messages": [7], "images": ["pictures/red.png"]}, "message 0 is int"),
        ({"question": "?"}, r"rows.jsonl:1: want .*found question"),
        ([7], r"rows.jsonl:1: want .*found \[7\]"),
    ],
)
def test_rows_that_cannot_be_used_are_refused_by_line(data, row, words):
    with pytest.raises(DataError, match=words):
        list(prompt_rows(written(data, row)))


def test_files_that_cannot_be_read_are_refused(data):
    with pytest.raises(DataError, match="no such file"):
        list(prompt_rows(data / "gone.jsonl"))
    (data / "rows.jsonl").write_text('{"prompt": "1"}\n{oops\n')
    with pytest.raises(DataError, match=r"rows.jsonl:2: not JSON"):
        list(prompt_rows(data / "rows.jsonl"))
    (data / "rows.jsonl").write_bytes('{"prompt": "é"}'.encode("latin-1"))
    with pytest.raises(DataError, match=r"rows.jsonl:1: not UTF-8 text"):
        list(prompt_rows(data / "rows.jsonl"))
    (data / "rows.jsonl").write_text("\n")
    with pytest.raises(DataError, match="it is empty"):
        list(prompt_rows(data / "rows.jsonl"))


def test_paths_in_a_directory_begin_where_their_file_lies(data):
    inner = data / "inner"
    (inner / "pictures").mkdir(parents=True)
    Image.new("RGB", (4, 4), "blue").save(inner / "pictures" / "blue.png")
    written(inner, {"prompt": "Which colour?", "image": "pictures/blue.png"})
    written(data, {"prompt": "Which colour?", "image": "pictures/red.png"})
    names = {Path(row["images"][0]) for row in prompt_rows(data)}
    assert names == {data / "pictures" / "red.png", inner / "pictures" / "blue.png"}


def test_a_row_with_videos_says_which_frames_are_shown(data):
    clip = write_clip(data / "clip.mp4", GREYS)
    told = {"type": "video", "video": "clip.mp4", "fps": 4.0}
    path = written(
        data,
        {"prompt": "What moves?", "video": "clip.mp4"},
        {
            "messages": [{"role": "user", "content": [told, MARK, WORDS]}],
            "image": "pictures/red.png",
        },
    )
    one, other = prompt_rows(path, None, VideoSampling(fps=1.0, max_frames=16))
    mark = {"type": "video"}
    assert one == {
        "messages": [{"role": "user", "content": [mark, {"type": "text", "text": "What moves?"}]}],
        "videos": [video_reference(clip, data, VideoSampling(fps=1.0, max_frames=16))],
    }
    assert other["messages"] == [{"role": "user", "content": [mark, MARK, WORDS]}]
    assert other["images"] == [str(data / "pictures" / "red.png")]
    assert other["videos"] == [video_reference(clip, data, VideoSampling(fps=4.0, max_frames=16))]
    write_rows(data / "kept.jsonl", [one, other])
    assert has_pictures(data / "kept.jsonl")
    assert most_videos(data / "kept.jsonl") == 1
    assert list(prompt_rows(data / "kept.jsonl")) == [one, other]


def test_videos_in_the_rows_of_a_table_become_files(data):
    clip = write_clip(data / "clip.mp4", GREYS).read_bytes()
    frames = [(data / "pictures" / "red.png").read_bytes()] * 2
    rows = [
        {"prompt": "What moves?", "videos": [{"bytes": clip, "path": None}]},
        {"prompt": "What moves?", "videos": [[{"bytes": frame} for frame in frames]]},
    ]
    for row in rows:
        pyarrow.parquet.write_table(pa.Table.from_pylist([row]), data / "rows.parquet")
        (kept,) = prompt_rows(data / "rows.parquet", data / "kept")
        (reference,) = kept["videos"]
        assert {Path(source).parent for source in video_sources(reference)} == {data / "kept"}
        assert read_video(reference).shape[0] == (4 if row is rows[0] else 2)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"prompt": "?", "videos": ["gone.mp4"]}, r"rows.jsonl:1: .*gone.mp4: No such file"),
        ({"prompt": "?", "videos": ["a.mp4"], "video": "b.mp4"}, "has both 'videos' and 'video'"),
        ({"prompt": "?", "video": "pictures"}, r"pictures.* is no video that can be read"),
        ({"prompt": "?", "videos": ["https://example.org/a.mp4"]}, "download it"),
        ({"prompt": "?", "videos": [{"video": "a.mp4", "fps": -1}]}, "fps > 0"),
    ],
)
def test_videos_that_cannot_be_shown_are_refused_by_line(data, row, words):
    with pytest.raises(DataError, match=words):
        list(prompt_rows(written(data, row)))
