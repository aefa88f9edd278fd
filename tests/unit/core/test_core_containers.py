"""Which files are opened as videos: those that hold their pictures, none that point elsewhere."""

import base64
import socket
from pathlib import Path

import numpy as np
import pytest

from cosmos_core.videos import VideoError, VideoSampling, video_info, video_reference

av = pytest.importorskip("av")

PLAYLIST = "#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1.0,\n{place}\n#EXT-X-ENDLIST\n"
STREAM = (
    "v=0\no=- 0 0 IN IP4 127.0.0.1\ns=x\nc=IN IP4 127.0.0.1\nt=0 0\n"
    "m=video {port} RTP/AVP 96\na=rtpmap:96 H264/90000\n"
)


def write_clip(path: Path) -> Path:
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=10)
        stream.width, stream.height, stream.pix_fmt = 64, 32, "yuv420p"
        for _ in range(10):
            frame = av.VideoFrame.from_ndarray(np.zeros((32, 64, 3), np.uint8), format="rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return path


def read(source: object, folder: Path) -> int:
    return video_info(video_reference(source, folder, VideoSampling())).num_frames


@pytest.mark.parametrize("name", ["a.mp4", "a.mov", "a.mkv", "a.avi", "a.ts", "a.nut"])
def test_files_that_hold_their_pictures_are_read(tmp_path, name):
    clip = write_clip(tmp_path / name)
    assert read(name, tmp_path) == 10
    assert read(clip.read_bytes(), tmp_path) == 10


@pytest.mark.parametrize("name", ["b.mp4", "b.m3u8", "b.ffconcat"])
@pytest.mark.parametrize("text", ["ffconcat version 1.0\nfile own.ts\n", PLAYLIST])
def test_a_list_of_other_files_reads_none_of_them(tmp_path, name, text):
    write_clip(tmp_path / "own.ts")
    (tmp_path / name).write_text(text.format(place="own.ts"))
    with pytest.raises(VideoError, match=f"{name} is no video that can be read"):
        read(name, tmp_path)


@pytest.mark.parametrize("inside", [False, True], ids=["file", "data"])
@pytest.mark.parametrize(
    ("text", "words"),
    [("ffconcat version 1.0\nfile {place}\n", ""), (PLAYLIST, ""), (STREAM, ".* not followed")],
)
def test_nobody_is_called_and_no_port_is_opened(tmp_path, text, words, inside):
    with socket.create_server(("127.0.0.1", 0)) as called, udp_port() as taken:
        port = called.getsockname()[1]
        told = text.format(place=f"http://127.0.0.1:{port}/a.ts", port=taken.getsockname()[1])
        encoded = base64.b64encode(told.encode()).decode()
        (tmp_path / "c.m3u8").write_text(told)
        with pytest.raises(VideoError, match=f"is no video that can be read{words}"):
            read(f"data:;base64,{encoded}" if inside else "c.m3u8", tmp_path)
        called.settimeout(0.05)
        with pytest.raises(TimeoutError):
            called.accept()


def udp_port() -> socket.socket:
    """Take a port that a description of streams names: opening it would fail in another way."""
    taken = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    taken.bind(("127.0.0.1", 0))
    return taken
