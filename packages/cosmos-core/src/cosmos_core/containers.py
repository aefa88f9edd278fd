"""Opening files of moving pictures: those that hold what they show, and none that point elsewhere.

FFmpeg finds out by itself what a file is. Some kinds are lists of other files and addresses (HLS,
DASH, concat) or descriptions of streams (SDP), which it would open: data could read other files and
reach hosts.
"""

from typing import TYPE_CHECKING, BinaryIO

from cosmos_core.images import MediaError

if TYPE_CHECKING:
    from av.container import InputContainer

_FORMATS = (
    ("mov", "mp4", "m4a", "3gp", "3g2", "mj2"),
    ("matroska", "webm", "avi", "asf", "flv", "ogg", "nut", "mxf"),
    ("mpegts", "mpeg", "mpegvideo", "m4v", "h264", "hevc", "av1", "obu", "ivf"),
    ("gif", "apng", "mjpeg", "dv", "rm", "wtv", "yuv4mpegpipe"),
    ("wav", "mp3", "flac"),  # to say of them that they have no pictures
)
_OPTIONS = {
    "format_whitelist": ",".join(name for names in _FORMATS for name in names),
    "protocol_whitelist": "file",
}


class ContainerError(MediaError):
    """Raised for files that point to others, and others that hold no moving pictures."""


def open_container(source: str | BinaryIO) -> "InputContainer":
    """Open a file of moving pictures with PyAV, to be closed by the caller.

    Args:
        source: its path, or its bytes as a stream.

    Raises:
        ContainerError: if it is of a kind that is not opened.
        av.error.FFmpegError: if it cannot be read.
    """
    import av
    from av.error import ArgumentError

    try:
        return av.open(source, mode="r", options=_OPTIONS)
    except ArgumentError as error:  # what FFmpeg says of kinds that it may not open
        raise ContainerError(
            "it is neither MP4, Matroska, AVI nor another kind that holds its pictures itself; "
            "playlists and descriptions of streams are not followed"
        ) from error
