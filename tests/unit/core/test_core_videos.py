"""Videos by reference: which frames are shown, and their pixels."""

import base64
import struct
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from cosmos_core.images import MediaError
from cosmos_core.videos import (
    VideoError,
    VideoInfo,
    VideoSampling,
    read_video,
    video_info,
    video_reference,
    video_sources,
    with_sources,
)

av = pytest.importorskip("av")
Image = pytest.importorskip("PIL.Image")
WIDTH, HEIGHT = 64, 32
FPS = 10
STEP = 8  # of grey from frame to frame


def write_video(
    path: Path, times: Sequence[int], *, codec: str = "libx264", pixels: str = "yuv420p"
) -> Path:
    """Write frames of one grey each, growing brighter, shown at these tenths of a second."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=FPS)
        stream.width, stream.height, stream.pix_fmt = WIDTH, HEIGHT, pixels
        stream.codec_context.time_base = Fraction(1, FPS)
        for number, time in enumerate(times):
            grey = np.full((HEIGHT, WIDTH, 3), STEP * number, dtype=np.uint8)
            frame = av.VideoFrame.from_ndarray(grey, format="rgb24")
            frame.pts, frame.time_base = time, Fraction(1, FPS)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return path


def shown(reference: str) -> list[int]:
    """Return which frames are shown by their grey."""
    frames = read_video(reference)
    assert frames.shape[1:] == (HEIGHT, WIDTH, 3)
    assert frames.dtype == np.uint8
    return [round(float(frame.mean()) / STEP) for frame in frames]


@pytest.fixture
def clip(tmp_path) -> Path:
    return write_video(tmp_path / "clip.mp4", range(30))  # three seconds


@pytest.mark.parametrize(
    ("sampling", "indices"),
    [
        (VideoSampling(), [0, 6, 12, 17, 23, 29]),
        (VideoSampling(fps=0.1), [0, 10, 19, 29]),  # four at least
        (VideoSampling(fps=100.0, max_frames=7), [0, 6, 12, 17, 23, 29]),  # pairs
        (VideoSampling(fps=100.0, max_frames=1), [0, 0]),
        (VideoSampling(fps=100.0), list(range(30))),
        (VideoSampling(start=1.0, end=2.0), [10, 13, 17, 20]),
        (VideoSampling(start=2.8), [28, 29]),
        (VideoSampling(start=2.9), [29, 29]),
        (VideoSampling(end=9.0, max_frames=2), [0, 29]),
    ],
)
def test_frames_are_taken_evenly(clip, sampling, indices):
    reference = video_reference(clip.name, clip.parent, sampling)
    info = video_info(reference)
    assert list(info.indices) == indices
    assert (info.height, info.width, info.fps) == (HEIGHT, WIDTH, 10.0)
    assert shown(reference) == indices


def test_what_models_are_told_of_a_video(clip):
    info = video_info(video_reference(clip, clip.parent, VideoSampling(start=1.0, end=2.0)))
    assert info == VideoInfo(
        height=HEIGHT, width=WIDTH, indices=(10, 13, 17, 20), num_frames=11, fps=10.0
    )
    metadata = info.metadata()
    assert metadata["frames_indices"] == [10, 13, 17, 20]
    assert (metadata["fps"], metadata["total_num_frames"]) == (10.0, 11)
    assert metadata["duration"] == pytest.approx(1.1)


@pytest.mark.parametrize(("name", "codec"), [("a.avi", "mpeg4"), ("a.mkv", "libx264")])
def test_other_containers_and_codecs(tmp_path, name, codec):
    write_video(tmp_path / name, range(12), codec=codec)
    assert shown(video_reference(name, tmp_path, VideoSampling(max_frames=4))) == [0, 4, 7, 11]


def test_frames_that_follow_unevenly_are_counted_one_by_one(tmp_path):
    path = write_video(tmp_path / "uneven.mp4", [0, 1, 2, 10, 20, 21, 40, 41])
    assert shown(video_reference(path, tmp_path, VideoSampling(fps=100.0))) == list(range(8))


def test_a_video_in_a_row_is_that_of_the_file(clip):
    data = clip.read_bytes()
    inside = video_reference({"bytes": data, "path": "gone.mp4"}, clip.parent, VideoSampling())
    assert shown(inside) == [0, 6, 12, 17, 23, 29]
    (source,) = video_sources(inside)
    assert base64.b64decode(source.partition(",")[2]) == data
    assert with_sources(inside, [str(clip)]) == video_reference(clip, clip.parent, VideoSampling())


def test_frames_may_be_pictures(tmp_path):
    for number in range(3):
        Image.new("RGB", (WIDTH, HEIGHT), (STEP * number,) * 3).save(tmp_path / f"{number}.png")
    names = [f"{number}.png" for number in range(3)]
    reference = video_reference(names, tmp_path, VideoSampling(fps=4.0))
    assert video_info(reference) == VideoInfo(
        height=HEIGHT, width=WIDTH, indices=(0, 1, 2), num_frames=3, fps=4.0
    )
    assert shown(reference) == [0, 1, 2]
    assert video_sources(reference) == tuple(str(tmp_path / name) for name in names)
    assert shown(video_reference(names[1:2], tmp_path, VideoSampling())) == [1, 1]
    Image.new("RGB", (8, 8)).save(tmp_path / "2.png")
    other = video_reference([*names, "2.png"], tmp_path, VideoSampling())
    with pytest.raises(VideoError, match="frames are of several sizes"):
        video_info(other)


def test_a_video_that_lies_on_its_side_is_turned(tmp_path):
    path = tmp_path / "lying.mp4"
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=10)
        stream.width, stream.height, stream.pix_fmt = WIDTH, HEIGHT, "yuv420p"
        pixels = np.zeros((HEIGHT, WIDTH, 3), dtype=np.uint8)
        pixels[:, : WIDTH // 2] = 255  # white on the left
        container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode())
    upright = struct.pack(">9i", 1 << 16, 0, 0, 0, 1 << 16, 0, 0, 0, 1 << 30)
    clockwise = struct.pack(">9i", 0, 1 << 16, 0, -1 << 16, 0, 0, 0, 0, 1 << 30)
    data = path.read_bytes()
    at = data.rindex(upright)  # of the track
    path.write_bytes(data[:at] + clockwise + data[at + len(upright) :])
    reference = video_reference(path, tmp_path, VideoSampling())
    assert (video_info(reference).height, video_info(reference).width) == (WIDTH, HEIGHT)
    frame, again = read_video(reference)
    assert np.array_equal(frame, again)
    assert frame[: WIDTH // 4].mean() > 250  # what was on the left is on top
    assert frame[-WIDTH // 4 :].mean() < 5


def test_a_damaged_frame_is_the_one_before_it(tmp_path):
    path = write_video(tmp_path / "damaged.avi", range(6), codec="mjpeg", pixels="yuvj420p")
    with av.open(str(path)) as container:
        packets = [bytes(packet) for packet in container.demux() if packet.size]
    whole = path.read_bytes()
    for packet in (packets[2], packets[5]):
        whole = whole.replace(packet, bytes(len(packet)))
    path.write_bytes(whole)
    assert shown(video_reference(path, tmp_path, VideoSampling(fps=100.0))) == [0, 1, 1, 3, 4, 4]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda path: path / "gone.mp4", "cannot read the video .*gone.mp4: No such file"),
        (lambda path: path / "text.mp4", "text.mp4 is no video that can be read"),
        (lambda path: path / "sound.wav", "has no moving pictures"),
        (lambda path: b"not a video", "is no video that can be read"),
        (lambda path: [str(path / "gone.png")], "cannot read the picture"),
    ],
)
def test_what_is_no_video_is_refused_by_name(tmp_path, make, words):
    (tmp_path / "text.mp4").write_text("not a video")
    with av.open(str(tmp_path / "sound.wav"), "w") as container:
        stream = container.add_stream("pcm_s16le", rate=8000, layout="mono")
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 800), np.int16), "s16", "mono")
        frame.sample_rate = 8000
        container.mux(stream.encode(frame))
        container.mux(stream.encode())
    reference = video_reference(make(tmp_path), tmp_path, VideoSampling())
    with pytest.raises(MediaError, match=words):
        video_info(reference)
    with pytest.raises(MediaError, match=words):
        read_video(reference)


@pytest.mark.parametrize(
    ("says", "words"),
    [
        ({"fps": 0}, "fps > 0"),
        ({"max_frames": 0}, "max_frames >= 1"),
        ({"start": 2.0, "end": 1.0}, "start < end"),
        ({"fps": "2"}, "fps is a number"),
    ],
)
def test_frames_that_cannot_be_asked_for(says, words):
    with pytest.raises(VideoError, match=words):
        VideoSampling().but(**says)


def test_sections_and_references_that_hold_nothing(clip):
    beyond = video_reference(clip, clip.parent, VideoSampling(start=4.0))
    with pytest.raises(VideoError, match="30 frames at 10 a second, and none in the section"):
        read_video(beyond)
    with pytest.raises(VideoError, match="a list of no frames"):
        video_reference([], clip.parent, VideoSampling())
    for reference in ("video:", "video:[]", "video:{}", str(clip)):
        with pytest.raises(VideoError, match="no reference of a video"):
            read_video(reference)
