"""The bytes of a request to a reward service: a line of JSON, then an array as NumPy writes it.

    {"prompts": [...], "reward_fn": {"prompt_colour": 1.0}, "media_type": "image"} <LF> NUMPY...

What is scored are pixels, or the latents of a video before any normalisation, which are some
tens of times fewer bytes and which the service decodes. Nothing of it is pickled; an array is
refused whose header and length do not agree.
"""

import io
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Float
from torch import Tensor

from cosmos_wfm.errors import RewardRequestError

MediaType = Literal["image", "latent", "video"]
_NUM_AXES = {"image": 4, "latent": 5, "video": 5}
_KNOWN = ("prompts", "reward_fn", "media_type")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RewardRequest:
    """Samples to be scored.

    Attributes:
        prompts: of each sample.
        rewards: name of a reward to its weight, which the service leaves to the client.
        media_type: what ``media`` holds.
        media: uint8; images [B, H, W, C], videos [B, C, T, H, W]. Latents are float16
            [B, C, t, h, w] as Wan's VAE has them, or bytes of bfloat16, uint8 [B, C, t, h, 2 w].
        extra: further fields, such as ``video_infos`` or what GenEval needs.
    """

    prompts: tuple[str, ...]
    rewards: Mapping[str, float]
    media_type: MediaType
    media: npt.NDArray[np.uint8] | npt.NDArray[np.float16]
    extra: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def pixels(self) -> Float[Tensor, "B 3 F H W"]:
        """Return the samples as videos in [0, 1]; an image has one frame.

        Raises:
            RewardRequestError: if they are latents.
        """
        if self.media_type == "latent":
            raise RewardRequestError("the samples are latents, which have to be decoded first")
        media = torch.from_numpy(self.media.copy()).float() / 255.0
        return media if self.media_type == "video" else media.permute(0, 3, 1, 2).unsqueeze(2)

    def latents(self) -> Float[Tensor, "B C t h w"]:
        """Return the latents, float32.

        Raises:
            RewardRequestError: if the samples are none.
        """
        if self.media_type != "latent":
            raise RewardRequestError(f"the samples are no latents but of type {self.media_type}")
        values = torch.from_numpy(self.media.copy())
        return (values.view(torch.bfloat16) if values.dtype is torch.uint8 else values).float()


def media_of(pixels: Float[Tensor, "B 3 *S"]) -> tuple[MediaType, npt.NDArray[np.uint8]]:
    """Return pixels in [-1, 1] as a request carries them: images B 3 H W, videos B 3 F H W."""
    scaled = (pixels.detach().float().cpu() * 127.5 + 127.5).round().clamp(0, 255)
    array = scaled.to(torch.uint8)
    if array.dim() == 5:
        return "video", array.contiguous().numpy()
    return "image", array.permute(0, 2, 3, 1).contiguous().numpy()


def latents_of(latents: Float[Tensor, "B C t h w"]) -> npt.NDArray[np.float16]:
    """Return latents of Wan's VAE, not normalised, as a request carries them."""
    return latents.detach().cpu().half().contiguous().numpy()


def pack_request(request: RewardRequest) -> bytes:
    """Return the body of a request."""
    head = {
        "prompts": list(request.prompts),
        "reward_fn": dict(request.rewards),
        "media_type": request.media_type,
        **request.extra,
    }
    buffer = io.BytesIO()
    np.save(buffer, request.media, allow_pickle=False)
    return json.dumps(head).encode() + b"\n" + buffer.getvalue()


def parse_request(body: bytes) -> RewardRequest:
    """Read the body of a request.

    Raises:
        RewardRequestError: says what of it is not as it must be.
    """
    line, separator, rest = body.partition(b"\n")
    if not separator:
        raise RewardRequestError("the body has no line end between its JSON and its array")
    head = _head(line)
    kind = head.get("media_type", "latent")  # what a client leaves out is latent
    if kind not in _NUM_AXES:
        raise RewardRequestError(f"media_type is {kind!r}; there are image, video and latent")
    media = _array(rest, kind)
    prompts = head.get("prompts")
    if not isinstance(prompts, list) or not all(isinstance(p, str) for p in cast("Any", prompts)):
        raise RewardRequestError("prompts is no list of texts")
    if len(cast("list[str]", prompts)) != len(media):
        raise RewardRequestError(f"{len(cast('Any', prompts))} prompts for {len(media)} samples")
    return RewardRequest(
        prompts=tuple(cast("list[str]", prompts)),
        rewards=_rewards(head.get("reward_fn")),
        media_type=kind,
        media=media,
        extra={name: value for name, value in head.items() if name not in _KNOWN},
    )


def _head(line: bytes) -> dict[str, Any]:
    try:
        head = json.loads(line)
    except ValueError as error:
        raise RewardRequestError(f"the first line is no JSON: {error}") from error
    if not isinstance(head, dict):
        raise RewardRequestError("the first line is no JSON object")
    return cast("dict[str, Any]", head)


def _rewards(named: object) -> dict[str, float]:
    """Return the rewards that are asked for: those whose weight is above 0."""
    if not isinstance(named, dict):
        raise RewardRequestError("reward_fn is no object of weights")
    weights = cast("dict[str, object]", named)
    wrong = [name for name, weight in weights.items() if not isinstance(weight, int | float)]
    if wrong:
        raise RewardRequestError(f"reward_fn.{wrong[0]} is no number")
    kept = {name: float(cast("float", w)) for name, w in weights.items() if cast("float", w) > 0}
    if not kept:
        raise RewardRequestError("reward_fn asks for no reward with a weight above 0")
    return kept


def _array(data: bytes, kind: MediaType) -> npt.NDArray[np.uint8] | npt.NDArray[np.float16]:
    """Read an array without trusting the length that its header claims."""
    stream = io.BytesIO(data)
    try:
        version = np.lib.format.read_magic(stream)
        read = {
            (1, 0): np.lib.format.read_array_header_1_0,
            (2, 0): np.lib.format.read_array_header_2_0,
        }[version]
        shape, fortran_order, dtype = read(stream)
    except (ValueError, KeyError) as error:
        raise RewardRequestError(f"the array cannot be read: {error}") from error
    types = ["uint8", "float16"] if kind == "latent" else ["uint8"]
    if str(dtype) not in types or fortran_order or len(shape) != _NUM_AXES[kind]:
        raise RewardRequestError(
            f"the array is {dtype} {shape}; want {' or '.join(types)} of {_NUM_AXES[kind]} axes in "
            "C order"
        )
    if kind == "latent" and dtype == np.uint8 and shape[-1] % 2:
        raise RewardRequestError(f"the array is {shape}, no pairs of bytes of bfloat16")
    values = data[stream.tell() :]
    if math.prod(shape) * dtype.itemsize != len(values):
        raise RewardRequestError(f"the array has {len(values)} bytes, its header says {shape}")
    if dtype == np.float16:
        return np.frombuffer(values, dtype=np.float16).reshape(shape)
    return np.frombuffer(values, dtype=np.uint8).reshape(shape)
