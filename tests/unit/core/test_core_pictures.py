"""Pictures and videos in the sinks that have a place for them."""

import struct
import time
import zlib
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from cosmos_core.metrics import (
    FanOut,
    JsonlSinkConfig,
    MediaRecord,
    MediaSink,
    SinkContext,
    TensorBoardSinkConfig,
    WandbSinkConfig,
    open_sinks,
)
from cosmos_core.rundir import RunDirectory


def png(width: int, height: int) -> bytes:
    """Return a black picture, written by hand."""
    rows = b"".join(b"\0" + bytes(3 * width) for _ in range(height))
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = [(b"IHDR", head), (b"IDAT", zlib.compress(rows)), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in chunks
    )


@pytest.fixture
def context(tmp_path: Path) -> SinkContext:
    run = RunDirectory(tmp_path, 0.0, None)
    return SinkContext(run=run, num_steps=3, console=Console(file=StringIO()), config={})


@pytest.fixture
def media(tmp_path: Path) -> MediaRecord:
    (tmp_path / "grid.png").write_bytes(png(5, 3))
    (tmp_path / "0_0.mp4").write_bytes(b"no real video")
    files = (tmp_path / "grid.png", tmp_path / "0_0.mp4")
    return MediaRecord(100.0, "policy", "policy-0", 2, "validation", files)


def test_tensorboard_shows_pictures_at_their_step_and_leaves_videos_out(context, media):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    sink = TensorBoardSinkConfig().build(context)
    assert isinstance(sink, MediaSink)
    sink.show(media)
    sink.close()
    events = EventAccumulator(str(context.run.path / "tensorboard" / "policy-0"))
    events.Reload()

    assert events.Tags()["images"] == ["policy/validation/grid"]
    [image] = events.Images("policy/validation/grid")
    assert (image.wall_time, image.step, image.width, image.height) == (100.0, 2, 5, 3)
    assert image.encoded_image_string == png(5, 3)


def test_wandb_keeps_pictures_and_videos_in_the_run_directory(context, media):
    pytest.importorskip("wandb")
    pytest.importorskip("PIL")
    sink = WandbSinkConfig().build(context)
    assert isinstance(sink, MediaSink)
    sink.show(media)
    sink.close()

    deadline = time.monotonic() + 60  # wandb's own process may write on when `close` has returned
    found: list[Path] = []
    while len(found) < 2 and time.monotonic() < deadline:
        kept = (context.run.path / "wandb").glob(
            "offline-run-*/files/media/*/policy-0/validation/*"
        )
        found = sorted(kept, key=lambda path: path.suffix)
        time.sleep(0.05)
    assert [path.suffix for path in found] == [".mp4", ".png"]
    assert found[0].read_bytes() == b"no real video"


def test_sinks_without_a_place_for_pictures_are_passed_over(context, media):
    sinks = open_sinks([JsonlSinkConfig()], context)
    sinks.show(media)
    sinks.close()

    assert context.run.metrics.read_bytes() == b""
    FanOut(()).show(media)
