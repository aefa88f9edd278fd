"""A run's rows, whose pictures and videos are files of the run, after its directory was moved."""

import io
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import pytest
from clips import write_clip
from PIL import Image

from cosmos_app.prepare import RunFiles, run_files
from cosmos_app.prepared_data import follow_data, prepare_data
from cosmos_app.recipe import Recipe, load_recipe
from cosmos_core.images import image_size
from cosmos_core.videos import read_video, video_sources

QUICKSTART = Path(__file__).parents[3] / "configs" / "quickstart.toml"


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    """Two rows to train on, one to validate on, each with a picture and a video in it."""
    picture = io.BytesIO()
    Image.new("RGB", (4, 4), "red").save(picture, "png")
    clip = write_clip(tmp_path / "clip.mp4", [(0, 0, 0), (9, 9, 9)]).read_bytes()
    media = {"images": [{"bytes": picture.getvalue()}], "videos": [{"bytes": clip}]}
    rows = [{"prompt": f"{number}?", "answer": "red", **media} for number in range(3)]
    pyarrow.parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    return load_recipe(QUICKSTART, [f"data.path={tmp_path / 'rows.parquet'}"])


def rows_of(files: RunFiles) -> list[dict[str, object]]:
    lines = [*files.train.read_text().splitlines(), *files.held_out.read_text().splitlines()]
    return [json.loads(line) for line in lines]


def test_rows_of_a_run_that_was_moved_name_its_files_where_they_are(
    recipe: Recipe, tmp_path: Path
) -> None:
    before = run_files(recipe, tmp_path / "run")
    assert prepare_data(recipe, before) == (2, 1)
    rows = rows_of(before)
    (tmp_path / "run").rename(tmp_path / "moved")
    after = run_files(recipe, tmp_path / "moved")
    follow_data(after)
    media = after.train.with_name("media")
    for old, new in zip(rows, rows_of(after), strict=True):
        (picture,), (video,) = new["images"], new["videos"]
        assert image_size(picture) == (4, 4)
        assert len(read_video(video)) == 2
        assert {Path(path).parent for path in (picture, *video_sources(video))} == {media}
        assert {**new, "images": old["images"], "videos": old["videos"]} == old


def test_rows_of_a_run_that_is_where_it_was_are_left_as_they_are(
    recipe: Recipe, tmp_path: Path
) -> None:
    files = run_files(recipe, tmp_path / "run")
    prepare_data(recipe, files)
    found = [path.stat().st_mtime_ns for path in (files.train, files.held_out)]
    follow_data(files)
    assert [path.stat().st_mtime_ns for path in (files.train, files.held_out)] == found


def test_rows_to_train_on_are_there_only_with_all_others(recipe: Recipe, tmp_path: Path) -> None:
    """Which is how one that is resumed knows that they need not be written again."""
    files = run_files(recipe, tmp_path / "run")
    files.held_out.mkdir(parents=True)  # so that writing ends there, as by a kill
    with pytest.raises(OSError, match=r"held_out"):
        prepare_data(recipe, files)
    assert not files.train.exists()
