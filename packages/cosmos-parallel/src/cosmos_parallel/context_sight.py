"""The vision part of a model, run by the ranks of a context group on a share of the pictures each.

Ranks that share sequences have the same pictures. In the models of `has_rotary_axes` a patch sees
others of its own frame only, and neither its position nor anything else tells frames of a video
apart, so any frames can be looked at anywhere; what is seen goes to all ranks.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from cosmos_parallel.sequences import gather_sequence

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# behind their vision parts a projector works picture by picture, and nothing counts them between
_PICTURE_BY_PICTURE = frozenset(
    {"gemma3", "internvl", "llava", "llava_next", "llava_onevision", "vipllava"}
)


def share_sight(model: "PreTrainedModel", group: dist.ProcessGroup) -> None:
    """Have each rank of a group look at its share of the frames, and all know what was seen.

    The gradient of what was seen is summed over the ranks, each of which goes on with a stretch of
    it; so is that of the vision part's weights, where they are shared.

    Args:
        model: of rotary axes.
        group: the ranks, which are given the same pictures.
    """
    _SightHooks(model.get_encoder(modality="image"), group)


def share_pictures(model: "PreTrainedModel", group: dist.ProcessGroup) -> None:
    """Have each rank of a group look at its share of the pictures, where they are of one shape.

    In models that are none of these, or are told sizes of pictures too, every rank looks at all.

    Args:
        model: that sees.
        group: the ranks, which are given the same pictures.
    """
    if model.config.model_type in _PICTURE_BY_PICTURE:
        base: Any = model.base_model  # of Hugging Face
        _PictureHooks(base.vision_tower, base.multi_modal_projector, group)


@dataclass(frozen=True, slots=True)
class Frames:
    """Consecutive frames of a batch's pictures and videos.

    Attributes:
        grids: int64[N, 3], time (1), height and width in patches of each frame.
        first: the first patch of the first of them.
        num_patches: of all of them.
        counts: false where they stand in for none, because all must look at something.
    """

    grids: Tensor
    first: int
    num_patches: int
    counts: bool


def divide_frames(grids: Tensor, num_parts: int) -> list[Frames]:
    """Cut pictures and videos between frames into parts of about as many patches.

    Args:
        grids: int64[N, 3], time, height and width in patches of each picture or video.
        num_parts: where frames do not suffice, a part is the first frame again.
    """
    frames = [(1, h, w) for t, h, w in grids.tolist() for _ in range(t)]
    starts = [0, *accumulate(h * w for _, h, w in frames)]
    # each frame goes where its middle patch falls
    owners = [num_parts * sum(ends) // (2 * starts[-1]) for ends in pairwise(starts)]
    parts: list[Frames] = []
    for part in range(num_parts):
        first, after = bisect_left(owners, part), bisect_right(owners, part)
        counts = first < after
        if not counts:
            first, after = 0, 1
        parts.append(
            Frames(
                grids=torch.tensor(frames[first:after], dtype=grids.dtype, device=grids.device),
                first=starts[first],
                num_patches=starts[after] - starts[first],
                counts=counts,
            )
        )
    return parts


class _SightHooks:
    """Gives the vision part this rank's frames, and its caller what all ranks have seen."""

    def __init__(self, vision: nn.Module, group: dist.ProcessGroup) -> None:
        self._group = group
        self._parts: list[Frames] = []
        vision.register_forward_pre_hook(self._divide, with_kwargs=True)
        vision.register_forward_hook(self._gather)

    def _divide(
        self, vision: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        self._parts = divide_frames(kwargs["grid_thw"], self._group.size())
        mine = self._parts[self._group.rank()]
        patches: Tensor = args[0].narrow(0, mine.first, mine.num_patches)
        return (patches, *args[1:]), kwargs | {"grid_thw": mine.grids}

    def _gather(self, vision: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        deep: Sequence[Tensor] = getattr(output, "deepstack_features", None) or ()
        seen: Tensor = torch.stack([output.pooler_output, *deep], dim=1)
        output.pooler_output, *found = _gathered(seen, self._parts, self._group).unbind(1)
        if deep:
            output.deepstack_features = found
        return output


class _PictureHooks:
    """Gives the vision part this rank's pictures, and who follows its projector those of all."""

    def __init__(self, vision: nn.Module, projector: nn.Module, group: dist.ProcessGroup) -> None:
        self._group = group
        self._parts: list[Frames] = []
        vision.register_forward_pre_hook(self._divide, with_kwargs=True)
        projector.register_forward_hook(self._gather)

    def _divide(
        self, vision: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        pixels: Tensor = args[0] if args else kwargs["pixel_values"]
        self._parts = []
        if "image_sizes" in kwargs:
            return args, kwargs
        # each is a frame of one patch
        ones = torch.ones(len(pixels), 3, dtype=torch.int64, device=pixels.device)
        self._parts = divide_frames(ones, self._group.size())
        mine = self._parts[self._group.rank()]
        pixels = pixels.narrow(0, mine.first, mine.num_patches)
        return ((pixels, *args[1:]), kwargs) if args else ((), kwargs | {"pixel_values": pixels})

    def _gather(self, projector: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        return _gathered(output, self._parts, self._group) if self._parts else output


def _gathered(seen: Tensor, parts: Sequence[Frames], group: dist.ProcessGroup) -> Tensor:
    """Return what all ranks have seen of the frames that count, in their order.

    Args:
        seen: [N, ...] of this rank's frames, as many of each patch as other ranks have.
        parts: of all ranks.
        group: the ranks.
    """
    mine = parts[group.rank()].num_patches
    lengths = [part.num_patches * len(seen) // mine for part in parts]
    missing = max(lengths) - len(seen)
    padded = functional.pad(seen, (0, 0) * (seen.ndim - 1) + (0, missing))
    found = gather_sequence(padded[None], group)[0].split(max(lengths))
    return torch.cat(
        [
            part[:length]
            for part, length, frames in zip(found, lengths, parts, strict=True)
            if frames.counts
        ]
    )
