"""What a model of rotary axes takes of a video: what it takes of a picture, and the times.

Its vision part sees each pair of frames by itself, as it sees a picture. So a video is shown as a
picture that is several pairs deep, and pictures and videos of a batch are seen in one pass; that
they are videos is told by positions alone.

    rendered    <user> [mark]                     what happens?  <assistant>
    expanded    <user> [vid] [vid] [vid] [vid]    what happens?  <assistant>
    as seen     <user> [img] [img] [img] [img]    what happens?  <assistant>

Qwen3-VL has the time in words before each pair. Frames are chosen by the reference of a video
(`cosmos_core.videos`); the model's processor, which could choose too, is told to take them all.
"""

from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cosmos_core.videos import VideoInfo, read_video, video_info
from cosmos_parallel.errors import PictureError
from cosmos_parallel.picture_tokens import Kind
from cosmos_parallel.rotary_axes import has_rotary_axes

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_EXPANSIONS_KEPT = 256


class VideoReader:
    """Turns videos into what stands for them, one at a time.

    Attributes:
        kinds: their tokens; none where the model is shown no videos.
    """

    def __init__(self, processor: Any, config: "PretrainedConfig") -> None:
        """Take a model's processor, which may lack its reader of videos, and its config."""
        self._processor = processor
        self._model_type = config.model_type
        self._mark = ""
        self.kinds: tuple[Kind, ...] = ()
        if has_rotary_axes(config):
            self._mark = processor.video_token
            mark_id = int(processor.tokenizer.convert_tokens_to_ids(self._mark))
            token_ids = tuple(processor.video_token_ids)
            kind = Kind(name="videos", mark=self._mark, mark_id=mark_id, token_ids=token_ids)
            self.kinds = (kind,)
        self._expansions = lru_cache(maxsize=_EXPANSIONS_KEPT)(self._expanded)

    def check(self) -> None:
        """Raise what stands against showing the model a video.

        Raises:
            PictureError: if it is shown none, or torchvision is not installed.
        """
        if not self.kinds:
            raise PictureError(
                f"{self._model_type} models are shown no videos; list frames as pictures"
            )
        if getattr(self._processor, "video_processor", None) is None:
            raise PictureError("showing a model videos needs 'pip install torchvision'")

    def expansion(self, reference: str) -> list[int]:
        """Return the tokens that stand for a video; of its frames one is decoded.

        Raises:
            MediaError: if it cannot be read.
            PictureError: as `check`.
            ValueError: if the processor refuses its shape.
        """
        self.check()
        return list(self._expansions(video_info(reference)))

    def tensors(self, reference: str) -> dict[str, Tensor]:
        """Return a video as tensors.

        Returns:
            ``pixel_values`` and ``image_grid_thw`` as pictures have them, ``input_ids``, and
            where positions tell of time ``seconds`` [1] from one pair of frames to the next.

        Raises:
            MediaError, PictureError, ValueError: as `expansion`.
        """
        self.check()
        frames = torch.from_numpy(read_video(reference)).permute(0, 3, 1, 2)
        given = self._process(frames, video_info(reference))
        tensors = {
            "input_ids": given["input_ids"],
            "pixel_values": given["pixel_values_videos"],
            "image_grid_thw": given["video_grid_thw"],
        }
        if "second_per_grid_ts" in given:
            tensors["seconds"] = given["second_per_grid_ts"]
        return tensors

    def _expanded(self, info: VideoInfo) -> tuple[int, ...]:
        """Return what the processor makes of a video of this shape, whose pixels are nowhere."""
        shape = (len(info.indices), 3, info.height, info.width)
        frames = torch.empty(shape, dtype=torch.uint8, device="meta")
        return tuple(self._process(frames, info)["input_ids"][0].tolist())

    def _process(self, frames: Tensor, info: VideoInfo) -> dict[str, Tensor]:
        """Return what the processor makes of one mark and its frames, uint8[T, 3, H, W]."""
        given = self._processor(
            videos=[frames],
            text=[self._mark],
            video_metadata=[info.metadata()],
            do_sample_frames=False,
            input_data_format="channels_first",
            add_special_tokens=False,
            return_tensors="pt",
        )
        return dict(given)
